"""Whether estimates are unbiased, how good they are and how good they could be; a check for samplers of your own."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conformance import check_sampler
    from .methods import AuditRow, KnownUpdates, Subject, all_samplers, audit, estimate_error, gram_of
    from .mse_bounds import least_mse, least_over_designs, lower_bound

__all__ = [
    "AuditRow",
    "KnownUpdates",
    "Subject",
    "all_samplers",
    "audit",
    "check_sampler",
    "estimate_error",
    "gram_of",
    "least_mse",
    "least_over_designs",
    "lower_bound",
]

_BOUNDS = {"least_mse", "least_over_designs", "lower_bound"}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: the bounds need SciPy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "conformance" if name == "check_sampler" else "mse_bounds" if name in _BOUNDS else "methods"
    value = globals()[name] = getattr(import_module(f".{module}", __name__), name)
    return value
