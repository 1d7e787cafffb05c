"""Data sets, partitions and models: what is learnt, and who holds which part of it. Importing it
loads no PyTorch.
"""

from .._lazy import loader, names_of

__all__ = sorted(names_of(__file__))  # noqa: PLE0605
__getattr__ = loader(__name__, names_of(__file__))
