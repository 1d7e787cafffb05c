"""The IDX format of MNIST and its kin: two zero bytes, type, number of axes, one big-endian size an axis, the
bytes.

Only unsigned bytes (type 8) occur in these data sets, and only they are read.
"""

import gzip
import struct
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError
from .sources import LARGEST

_UNSIGNED_BYTE = 8
_GZIP = b"\x1f\x8b"
_PIECE = 1 << 20


def read_pieces(path: Path, most: int) -> Iterator[bytes]:
    """The content of a file, piece by piece, unpacked if it is gzipped, which its first two bytes tell.

    A gzipped file can hold a thousand times its own size, so no more is unpacked than ``most`` bytes and one piece.

    Raises:
        DeltaflError: If it cannot be read, its compressed data are broken, or it holds more than ``most`` bytes.
    """
    size = 0
    try:
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP
            file.seek(0)
            with gzip.GzipFile(fileobj=file) if packed else nullcontext(file) as content:
                while piece := content.read(_PIECE):
                    size += len(piece)
                    if size > most:
                        raise DeltaflError(f"{path} holds more than {most} bytes; remove it and fetch it again")
                    yield piece
    except (OSError, EOFError, zlib.error) as error:
        raise DeltaflError(f"cannot read {path}: {error}; remove it and fetch it again") from error


def read_idx(path: Path, num_axes: int) -> npt.NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes.

    Args:
        path: The file, gzipped or not.
        num_axes: How many axes it must have: 1 for labels, 3 for images.

    Returns:
        uint8 array, read-only.

    Raises:
        DeltaflError: If it cannot be read, is of another kind, or is shorter or longer than its header says.
    """
    content = b"".join(read_pieces(path, LARGEST))
    offset = 4 + 4 * num_axes
    if len(content) < offset or content[:4] != bytes([0, 0, _UNSIGNED_BYTE, num_axes]):
        raise DeltaflError(f"{path} is no IDX file of bytes with {num_axes} axes: it starts with {content[:4].hex()!r}")
    shape = struct.unpack(f">{num_axes}I", content[4:offset])
    expected = offset + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        raise DeltaflError(f"{path} has {len(content)} bytes, its header announces {expected}: fetch it again")
    return np.frombuffer(content, np.uint8, offset=offset).reshape(shape)


def idx_header(array: npt.NDArray[Any]) -> bytes:
    """The bytes that stand before an array of unsigned bytes in an IDX file."""
    return bytes([0, 0, _UNSIGNED_BYTE, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
