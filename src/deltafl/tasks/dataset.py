"""Examples as they are stored, before they are split over clients."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..types import Array, IntArray


@dataclass(frozen=True)
class Dataset:
    """Examples as they are stored, before they are split over clients.

    Attributes:
        name: The name of the data that were read, which says so where their content is not the
            published one.
        train_x: uint8 or float32, (N, ...); images are (N, channels, height, width). Tokens are
            uint8 or int64.
        train_y: (N,) int64 class labels, (N, ..., L) of sequences; float32 targets; or (N, labels)
            float32, 1 where an example has the label.
        test_x: The pooled test set.
        test_y: Its labels.
        num_classes: Number of classes, or of labels; 0 for regression.
        columns: Natural owners of the training examples by column name, each int64 (N,).
        test_columns: The same for the test examples, where they have the same owners; else empty.
        class_names: The names of the classes, or labels, where they are known.
        examples_crc32: Of a table a checksum of its examples before a seed has split them; else
            empty.
    """

    name: str
    train_x: Array
    train_y: Array
    test_x: Array
    test_y: Array
    num_classes: int
    columns: Mapping[str, IntArray] = field(default_factory=dict)
    test_columns: Mapping[str, IntArray] = field(default_factory=dict)
    class_names: Sequence[str] = ()
    examples_crc32: str = ""

    @classmethod
    def whole(
        cls,
        name: str,
        x: Array,
        y: Array,
        num_classes: int,
        columns: Mapping[str, IntArray] | None = None,
    ) -> "Dataset":
        """Examples of which none is for the test, to be ``split``."""
        return cls(name, x, y, x[:0], y[:0], num_classes, columns or {})

    def split(self, train: Any, test: Any) -> "Dataset":
        """Of the training examples those that stay, and those that are the test set from now on;
        rows, masks or slices.
        """
        return replace(
            self,
            train_x=self.train_x[train],
            train_y=self.train_y[train],
            test_x=self.train_x[test],
            test_y=self.train_y[test],
            columns={name: column_e[train] for name, column_e in self.columns.items()},
            test_columns={name: column_e[test] for name, column_e in self.columns.items()},
        )


def crc32_of(arrays: Iterable[Array]) -> str:
    """The CRC-32 of arrays, eight hexadecimal digits."""
    checksum = 0
    for part in arrays:
        array = np.ascontiguousarray(part)
        # The type and the shape, too: zeros of any type have the same bytes.
        checksum = zlib.crc32(f"{array.dtype} {array.shape}".encode(), checksum)
        checksum = zlib.crc32(array.reshape(-1).view(np.uint8).data, checksum)
    return f"{checksum:08x}"
