"""The IDX format of MNIST and its kin: two zero bytes, type, number of axes, one big-endian size an axis, the
bytes.

Only unsigned bytes (type 8) occur in these data sets, and only they are read.
"""

import gzip
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError

_UNSIGNED_BYTE = 8
_GZIP = b"\x1f\x8b"


def read_bytes(path: Path) -> bytes:
    """The content of a file, unpacked if it is gzipped, which its first two bytes tell.

    Raises:
        DeltaflError: If it cannot be read or its compressed data are broken.
    """
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == _GZIP else content
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
    content = read_bytes(path)
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
