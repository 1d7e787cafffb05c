# The names of the package: see ``deltafl/_lazy.py``.

from .conformance import check_sampler as check_sampler
from .control import check_control as check_control
from .methods import AuditRow as AuditRow
from .methods import KnownUpdates as KnownUpdates
from .methods import Subject as Subject
from .methods import audit as audit
from .methods import estimate_error as estimate_error
from .mse_bounds import least_mse as least_mse
from .mse_bounds import least_over_designs as least_over_designs
from .mse_bounds import lower_bound as lower_bound
