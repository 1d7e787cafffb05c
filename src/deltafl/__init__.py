"""deltafl: client sampling for federated learning.

Which few of m clients to select each round, with which probabilities, and how to weigh their
replies so that the result is what full participation would have given. Start at ``round.py``; the
public names are in ``__init__.pyi``. They are loaded when first used, so that ``import deltafl``
costs next to nothing, and need NumPy alone. So are the packages ``analysis``, ``audit``,
``simulation`` and ``tasks``.
"""

from ._lazy import HERE, loader, names_of

__version__ = "0.1.0"

_MODULES = names_of(__file__)
__all__ = sorted(name for name in _MODULES if _MODULES[name] != HERE)  # noqa: PLE0605
__getattr__ = loader(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
