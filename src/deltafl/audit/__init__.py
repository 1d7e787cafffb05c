"""Whether estimates are unbiased, how good they are and how good they could be; a check for
samplers of your own.
"""

from .._lazy import loader, names_of

__all__ = sorted(names_of(__file__))  # noqa: PLE0605
__getattr__ = loader(__name__, names_of(__file__))
