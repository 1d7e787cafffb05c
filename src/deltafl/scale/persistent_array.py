"""Immutable arrays of which a round replaces n of m entries, in O(n) and not O(m).

States of rounds are values: a round may be opened again from an older one. The newest version holds
the buffer, each older one only what differs from the next newer; reading an older version brings
the buffer back to it and turns the differences around (Baker, "Shallow binding makes functional
arrays fast", SIGPLAN Notices 1991). Where an older version stays in use, the newest takes a buffer
of its own after as many changes as there are entries: O(1) a change on average. Versions of one
array share their buffer, so that they must not be read in two threads at once.
"""

from collections.abc import Callable
from typing import Any, Self
from weakref import ref

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

#: As in ``types.py``, which is above this file.
Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]


class Buffer:
    """The entries of the newest version, and how many were changed since an older one may be in
    use.
    """

    def __init__(self, array_m: Array) -> None:
        self.array_m = array_m
        self.changes = 0
        #: The version before the newest; None once it is gone. Whoever holds an older one holds
        #: this one too.
        self.before: Callable[[], object] = lambda: None

    def write(self, index_k: IntArray, value_k: Array) -> None:
        """Change entries."""
        self.array_m[index_k] = value_k

    def copy(self) -> "Buffer":
        """A buffer of its own with the same entries."""
        return Buffer(np.array(self.array_m))


class PersistentArray(NDArrayOperatorsMixin):
    """A one-dimensional array that is never changed: ``replaced`` makes another one, in O(k) for k
    entries.

    In arithmetic and NumPy functions it is the array it stands for; those read all of it. What is
    read is a copy. The array that it is made of belongs to it from now on.
    """

    def __init__(self, array_m: Array) -> None:
        self._buffer: Any = Buffer(array_m)
        #: None for the version that the buffer is at; else (places, entries there, the next version
        #: on the way).
        self._difference: tuple[IntArray, Array, Self] | None = None

    def replaced(self, index_k: IntArray, value_k: npt.ArrayLike) -> Self:
        """The array with other entries at k distinct places."""
        # A copy, for it is kept: callers may use theirs for something else.
        index_k = np.array(index_k, np.int64)
        buffer = self.current()
        newer = object.__new__(type(self))
        newer._difference = None
        # Nobody holds the version before, so that no older one will be read.
        if buffer.before() is None:
            buffer.changes = 0
        # A copy of all entries costs no more than the changes that came before it.
        if buffer.changes + len(index_k) > len(self):
            newer._buffer = buffer.copy()
        else:
            newer._buffer = buffer
            # Weakly: the buffer must not keep an older version alive.
            buffer.before = ref(self)
            self._difference = (index_k, buffer.array_m[index_k], newer)
        newer._buffer.changes += len(index_k)
        newer._buffer.write(index_k, np.asarray(value_k, self.dtype))
        return newer

    def plus_one(self, index_k: IntArray) -> Self:
        """The array with k distinct entries raised by one; of a wider type where one would
        overflow.
        """
        value_k = self[index_k].astype(np.int64) + 1
        if value_k.max(initial=0) > np.iinfo(self.dtype).max:
            # Of a negative number, so that the type is a signed one.
            needed = np.min_scalar_type(-int(value_k.max()) - 1)
            wider = np.promote_types(self.dtype, needed)
            widened = type(self)(np.asarray(self).astype(wider))
            return widened.replaced(index_k, value_k)
        return self.replaced(index_k, value_k)

    def current(self) -> Any:
        """The buffer, brought back to this version. Others must not write into it."""
        path = []
        version = self
        while version._difference is not None:
            path.append(version)
            version = version._difference[2]
        if path:
            # Newer versions may be in use, whoever holds them.
            self._buffer.before = lambda: True
        # From the newest version to this one: each exchanges its entries with those of the buffer,
        # so that the differences point the other way afterwards.
        for older in reversed(path):
            index_k, value_k, newer = older._difference  # type: ignore[misc]  # all on the path have one
            newer._difference = (index_k, self._buffer.array_m[index_k], older)
            self._buffer.write(index_k, value_k)
            older._difference = None
        return self._buffer

    @property
    def shape(self) -> tuple[int, ...]:
        """(m,)."""
        return (len(self),)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the entries."""
        dtype: np.dtype[Any] = self._buffer.array_m.dtype
        return dtype

    def __len__(self) -> int:
        return len(self._buffer.array_m)

    def __getitem__(self, index: Any) -> Any:
        part = self.current().array_m[index]
        # A slice is a view of the buffer, which later versions change.
        if isinstance(part, np.ndarray) and part.base is not None:
            return part.copy()
        return part

    def __array__(
        self,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,
    ) -> Array:
        if copy is False:
            raise ValueError("a version of an array can only be read by copying it")
        return np.array(self.current().array_m, dtype)

    def __array_ufunc__(
        self,
        ufunc: np.ufunc,
        method: str,
        *inputs: Any,
        **kwargs: Any,
    ) -> Any:
        if any(isinstance(out, PersistentArray) for out in kwargs.get("out", ())):
            raise TypeError("a version of an array is never changed; use replaced(places, entries)")
        plain = list(inputs)
        for place, value in enumerate(inputs):
            if isinstance(value, PersistentArray):
                plain[place] = np.asarray(value)
        return getattr(ufunc, method)(*plain, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles share nothing with the original.
        return type(self), (np.asarray(self),)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({np.asarray(self)!r})"

    def sum(self) -> Any:
        """The sum of all entries."""
        return np.asarray(self).sum()

    def tolist(self) -> list[Any]:
        """All entries as a list of numbers."""
        entries: list[Any] = np.asarray(self).tolist()
        return entries
