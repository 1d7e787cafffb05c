# The names of the package. Type checkers and editors read this file; ``_lazy.py`` loads a name from
# the module that stands here when it is first used.

from .accumulate import Accumulator as Accumulator
from .analysis.recommendation import recommend as recommend
from .arrays import flatten as flatten
from .arrays import unflatten as unflatten
from .audit import KnownUpdates as KnownUpdates
from .designs.cost import probabilities_for_budget as probabilities_for_budget
from .designs.inclusion import inclusion_probabilities as inclusion_probabilities
from .designs.inclusion import with_floor as with_floor
from .designs.table import DESIGNS as DESIGNS
from .designs.table import Design as Design
from .designs.table import draw_cohort as draw_cohort
from .errors import DeltaflError as DeltaflError
from .errors import MissingExtraError as MissingExtraError
from .estimators.control_variates import ControlVariate as ControlVariate
from .estimators.learned_coefficient import LearnedCoefficient as LearnedCoefficient
from .estimators.table import ESTIMATORS as ESTIMATORS
from .estimators.table import Estimator as Estimator
from .estimators.twin import Twin as Twin
from .estimators.value import ControlValue as ControlValue
from .federation.clients import resize_state as resize_state
from .federation.local_work import corrected_steps as corrected_steps
from .moves import Moves as Moves
from .plan import Plan as Plan
from .plan import RoundState as RoundState
from .plan import make_plan as make_plan
from .round import broadcast as broadcast
from .round import close_round as close_round
from .round import close_round_from_sum as close_round_from_sum
from .round import init_round as init_round
from .round import open_round as open_round
from .samplers import SAMPLERS as SAMPLERS
from .samplers import RunFacts as RunFacts
from .samplers import Sampler as Sampler
from .samplers import make_sampler as make_sampler
from .samplers.census import Census as Census
from .samplers.centred import Centred as Centred
from .samplers.cluster import ClusterIS as ClusterIS
from .samplers.delta import Delta as Delta
from .samplers.delta import FedIS as FedIS
from .samplers.delta import FedPracIS as FedPracIS
from .samplers.delta import PracDelta as PracDelta
from .samplers.fixed import Fixed as Fixed
from .samplers.fixed import Full as Full
from .samplers.power_of_choice import PowerOfChoice as PowerOfChoice
from .scale.state_file import load_state as load_state
from .scale.state_file import save_state as save_state
from .server.optimizers import Adaptive as Adaptive
from .server.optimizers import FedExP as FedExP
from .server.optimizers import Momentum as Momentum
from .server.optimizers import ServerOptimizer as ServerOptimizer
from .server.optimizers import Sgd as Sgd
from .server.optimizers import make_server_optimizer as make_server_optimizer
from .server.part import ServerPart as ServerPart
from .server.part import Step as Step
from .server.privacy import DifferentialPrivacy as DifferentialPrivacy
from .simulation.comparison import Comparison as Comparison
from .simulation.python import compare as compare
from .simulation.python import load as load
from .simulation.python import plan_for as plan_for
from .simulation.python import tune as tune
from .streams import stream as stream
from .tasks.metrics import Metric as Metric
from .types import Broadcast as Broadcast
from .types import Cohort as Cohort
from .types import Oracle as Oracle
from .types import Population as Population
from .types import RejectedReply as RejectedReply
from .types import Replies as Replies
from .types import Reports as Reports
from .types import RoundInfo as RoundInfo

__version__: str
__all__: list[str]
_MODULES: dict[str, str]
