"""The samplers by name: one file per method; ``base.py`` has the base class, ``table.py`` the
names.
"""

from .._lazy import loader, names_of

__all__ = sorted(names_of(__file__))  # noqa: PLE0605
__getattr__ = loader(__name__, names_of(__file__))
