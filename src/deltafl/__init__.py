"""deltafl: client sampling for federated learning.

Which few of m clients to select each round, with which probabilities, and how to weigh their
replies so that the result is what full participation would have given. Start at ``round.py``; the
names below are the public ones. They are loaded when first used, so that ``import deltafl`` costs
next to nothing, and need NumPy alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accumulate import Accumulator
    from .analysis.recommend import recommend
    from .arrays import flatten, unflatten
    from .audit import KnownUpdates
    from .designs.inclusion import inclusion_probabilities, with_floor
    from .designs.table import DESIGNS, Design, draw_cohort
    from .errors import DeltaflError, MissingExtraError
    from .estimators.control_variates import ControlValue, ControlVariate
    from .estimators.learned_coefficient import LearnedCoefficient
    from .estimators.table import ESTIMATORS, Estimator
    from .estimators.twin import Twin
    from .federation.local_work import corrected_steps
    from .moves import Moves
    from .plan import Plan, RoundState, make_plan
    from .round import (
        broadcast,
        close_round,
        close_round_from_sum,
        init_round,
        open_round,
    )
    from .samplers import SAMPLERS, RunFacts, Sampler, make_sampler
    from .samplers.census import Census
    from .samplers.centred import Centred
    from .samplers.cluster import ClusterIS
    from .samplers.delta import Delta, FedIS, FedPracIS, PracDelta
    from .samplers.fixed import Fixed, Full
    from .samplers.power_of_choice import PowerOfChoice
    from .scale.state_file import load_state, save_state
    from .server.optimizers import (
        Adaptive,
        FedExP,
        Momentum,
        ServerOptimizer,
        Sgd,
        make_server_optimizer,
    )
    from .server.part import ServerPart, Step
    from .server.privacy import DifferentialPrivacy
    from .simulation.comparison import Comparison
    from .simulation.python import compare, load, tune
    from .streams import stream
    from .types import (
        Broadcast,
        Cohort,
        Oracle,
        Population,
        RejectedReply,
        Replies,
        Reports,
        RoundInfo,
    )

__version__ = "0.1.0"

__all__ = [
    "DESIGNS",
    "ESTIMATORS",
    "SAMPLERS",
    "Accumulator",
    "Adaptive",
    "Broadcast",
    "Census",
    "Centred",
]
__all__ += [
    "ClusterIS",
    "Cohort",
    "Comparison",
    "ControlValue",
    "ControlVariate",
    "Delta",
]
__all__ += [
    "DeltaflError",
    "Design",
    "DifferentialPrivacy",
    "Estimator",
    "FedExP",
    "FedIS",
    "FedPracIS",
    "Fixed",
]
__all__ += [
    "Full",
    "KnownUpdates",
    "LearnedCoefficient",
    "MissingExtraError",
    "Momentum",
    "Moves",
    "Oracle",
    "Plan",
]
__all__ += [
    "Population",
    "PowerOfChoice",
    "PracDelta",
    "RejectedReply",
    "Replies",
    "Reports",
]
__all__ += [
    "RoundInfo",
    "RoundState",
    "RunFacts",
    "Sampler",
    "ServerOptimizer",
    "ServerPart",
    "Sgd",
    "Step",
    "Twin",
    "broadcast",
]
__all__ += [
    "close_round",
    "close_round_from_sum",
    "compare",
    "corrected_steps",
    "draw_cohort",
    "flatten",
]
__all__ += [
    "inclusion_probabilities",
    "init_round",
    "load",
    "load_state",
    "make_plan",
    "make_sampler",
]
__all__ += [
    "make_server_optimizer",
    "open_round",
    "recommend",
    "save_state",
    "stream",
    "tune",
    "unflatten",
]
__all__ += ["with_floor"]

#: Which module a name is loaded from.
_MODULES = {
    name: module
    for module, names in {
        "accumulate": "Accumulator",
        "analysis.recommend": "recommend",
        "arrays": "flatten unflatten",
        "audit": "KnownUpdates",
        "samplers.census": "Census",
        "designs.inclusion": "inclusion_probabilities with_floor",
        "designs.table": "DESIGNS Design draw_cohort",
        "errors": "DeltaflError MissingExtraError",
        "estimators.control_variates": "ControlValue ControlVariate",
        "estimators.learned_coefficient": "LearnedCoefficient",
        "estimators.table": "ESTIMATORS Estimator",
        "estimators.twin": "Twin",
        "federation.local_work": "corrected_steps",
        "moves": "Moves",
        "plan": "Plan RoundState make_plan",
        "round": "broadcast close_round close_round_from_sum init_round open_round",
        "samplers": "SAMPLERS RunFacts Sampler make_sampler",
        "samplers.centred": "Centred",
        "samplers.cluster": "ClusterIS",
        "samplers.delta": "Delta FedIS FedPracIS PracDelta",
        "samplers.fixed": "Fixed Full",
        "samplers.power_of_choice": "PowerOfChoice",
        "scale.state_file": "load_state save_state",
        "server.part": "ServerPart Step",
        "server.optimizers": "Adaptive FedExP Momentum ServerOptimizer Sgd make_server_optimizer",
        "server.privacy": "DifferentialPrivacy",
        "simulation.comparison": "Comparison",
        "simulation.python": "compare load tune",
        "streams": "stream",
        "types": "Broadcast Cohort Oracle Population RejectedReply Replies Reports RoundInfo",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    """Load a public name (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
