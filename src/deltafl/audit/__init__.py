"""Whether estimates are unbiased, how good they are and how good they could be; a check for
samplers of your own.
"""

from .conformance import check_sampler
from .methods import AuditRow, KnownUpdates, Subject, audit, estimate_error
from .mse_bounds import least_mse, least_over_designs, lower_bound

__all__ = [
    "AuditRow",
    "KnownUpdates",
    "Subject",
    "audit",
    "check_sampler",
    "estimate_error",
    "least_mse",
]
__all__ += ["least_over_designs", "lower_bound"]
