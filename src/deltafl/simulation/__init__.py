"""Simulated federations: local training, the experiment loop, its records and their resumption.

The public names are in ``__init__.pyi``; they are loaded when they are first used, for settings and
records need no PyTorch.
"""

from .._lazy import loader, names_of

__all__ = sorted(names_of(__file__))  # noqa: PLE0605
__getattr__ = loader(__name__, names_of(__file__))
