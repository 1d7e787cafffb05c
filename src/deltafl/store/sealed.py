"""A sealed file: arrays, and a header that describes them, with checksums of both.

It is a safetensors file, so that others can read the arrays. One that is damaged, cut off or edited
is refused.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO

import numpy as np

from ..errors import DeltaflError
from ..types import Array, Json
from .files import opened, write_atomically
from .room import require_ram

#: safetensors' names of types.
_TYPES = {
    **{f"F{bits}": np.dtype(f"f{bits // 8}") for bits in (64, 32, 16)},
    **{f"I{bits}": np.dtype(f"i{bits // 8}") for bits in (64, 32, 16, 8)},
    **{f"U{bits}": np.dtype(f"u{bits // 8}") for bits in (64, 32, 16, 8)},
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
#: Where safetensors keeps texts.
_TEXTS = "__metadata__"
_SEAL = "seal"
#: So many bytes at most are copied rather than mapped.
LARGEST_COPY = 2**30
#: What reading a file raises that has other content than it should.
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def write_sealed(
    path: Path,
    arrays: Mapping[str, Array],
    header: Json | None = None,
    private: bool = True,
    users: bool = False,
    types: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write arrays, and a header that JSON can hold, by ``write_atomically``.

    ``types`` names the types that NumPy does not have, of arrays that are their bits, as whole
    numbers.
    """
    # Wide types first: every array begins at a multiple of its width.
    ordered = dict(sorted(arrays.items(), key=lambda part: -part[1].itemsize))
    entries: Json = {}
    checksum = 0
    end = 0
    for name, given in ordered.items():
        # Files such as MNIST's own have the bytes of a number in the other order.
        array = given.astype(given.dtype.newbyteorder("="), copy=False)
        if array.dtype not in _NAMES:
            names = ", ".join(dtype.name for dtype in _NAMES)
            raise DeltaflError(
                f"{name} has type {array.dtype}, which a file of arrays does not hold; use one of "
                f"{names}"
            )
        ordered[name] = np.ascontiguousarray(array)
        entries[name] = {
            "dtype": types.get(name, _NAMES[array.dtype]),
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
        checksum = zlib.crc32(ordered[name].data, checksum)
    entries[_TEXTS] = {
        "header": json.dumps(dict(header or {})),
        "crc32": f"{checksum:08x}",
        "format": "pt",  # what readers of models for PyTorch ask for
    }
    # Of the header without this entry, which is taken out again before it is compared.
    entries[_TEXTS][_SEAL] = _seal_of(entries)
    text = json.dumps(entries).encode()
    # Filled up with spaces: the arrays after it begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    length = len(text).to_bytes(8, "little")
    write_atomically(path, length, text, *ordered.values(), private=private, users=users)


def read_sealed(
    path: Path,
    cure: str,
    mapped: bool = False,
    users: bool = False,
) -> tuple[dict[str, Array], Json]:
    """The arrays and the header; an error of a file that is not as it was written ends in
    ``cure``.

    ``users``: as for ``opened``. ``mapped``: those of a file of more than ``LARGEST_COPY`` are
    mapped into memory, and what changes in them stays there.
    """
    with opened(path, users=users) as file, _damage_refused(path, cure):
        entries = _read_entries(file)
        texts = entries.pop(_TEXTS)
        first = file.tell()
        size = file.seek(0, 2) - first
        # Who writes over a mapped file changes the arrays, and who cuts it off ends the process.
        if mapped and size > LARGEST_COPY:
            data = np.asarray(np.memmap(file, np.uint8, mode="c"))[first:]
        else:
            require_ram(size)
            file.seek(first)
            data = np.fromfile(file, np.uint8)
        if f"{zlib.crc32(data.data):08x}" != texts["crc32"]:
            raise ValueError("the arrays have another checksum")
        arrays = {}
        for name, entry in entries.items():
            start, end = entry["data_offsets"]
            array = data[start:end].view(_TYPES[entry["dtype"]])
            arrays[name] = array.reshape(entry["shape"])
        return arrays, json.loads(texts["header"])


def read_array(path: Path, cure: str, name: str) -> Array:
    """One array of a file, which must hold it."""
    with _damage_refused(path, cure):
        return read_sealed(path, cure)[0][name]


def read_header(path: Path, cure: str) -> Json:
    """The header alone, however long the arrays are."""
    with opened(path) as file, _damage_refused(path, cure):
        header: Json = json.loads(_read_entries(file)[_TEXTS]["header"])
        return header


def _read_entries(file: IO[bytes]) -> Json:
    length = int.from_bytes(file.read(8), "little")
    # A damaged length may be larger than any memory.
    if length > file.seek(0, 2):
        raise ValueError("it is cut off")
    require_ram(20 * length)
    file.seek(8)
    entries: Json = json.loads(file.read(length))
    if entries[_TEXTS].pop(_SEAL) != _seal_of(entries):
        raise ValueError("the header has another checksum")
    return entries


def _seal_of(entries: Json) -> str:
    return f"{zlib.crc32(json.dumps(entries).encode()):08x}"


@contextmanager
def _damage_refused(path: Path, cure: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise DeltaflError(
            f"{path} is not as it was written, or another version wrote it: {cure}"
        ) from error
