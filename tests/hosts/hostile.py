"""What a hostile client may send in place of an array, its bytes, or a number: for all hosts."""

import io
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from deltafl.types import Array

ESCAPES = "\x1b[2J\x07\nRound 9: all is well \u202e\u2028"
LONG = "x" * 10**6


class Rude:
    """Ends the program of whoever converts it."""

    def __array__(self, *given: object, **more: object) -> Array:
        raise SystemExit(3)

    def __float__(self) -> float:
        raise SystemExit(3)

    def __str__(self) -> str:
        raise SystemExit(3)

    def __repr__(self) -> str:
        return "Rude()"


def npz(array: Array) -> bytes:
    file = io.BytesIO()
    np.savez(file, x=array)
    return file.getvalue()


def bomb() -> bytes:
    """An archive of 60 kB that would be 64 MB."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", npy(np.zeros(2**24, np.float32)))
    return file.getvalue()


def npy(array: Array) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def headed(shape: str, descr: str = "'<f4'", data: bytes = b"", version: bytes = b"\1\0") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY" + version + len(header).to_bytes(2, "little") + header + data


def filled(array: Array, dtype: Any) -> Array:
    return np.zeros(array.shape, dtype)


#: What takes the place of an array of floats, with one axis or two; by a word for it.
ARRAYS: dict[str, Callable[[Array], Any]] = {
    "objects": lambda x: x.astype(object),
    "rude objects": np.frompyfunc(lambda _: Rude(), 1, 1),
    "structured": lambda x: filled(x, [("a", "f4"), ("b", "i8")]),
    "titled": lambda x: filled(x, {"names": ["a"], "formats": ["f4"], "titles": ["t"]}),
    "subarrays": lambda x: filled(x, [("a", "f4", (2, 2))]),
    "records": lambda x: np.rec.array(filled(x, [("a", "f4")])),
    "dates": lambda x: filled(x, "M8[s]"),
    "durations": lambda x: filled(x, "m8[s]"),
    "texts": lambda x: np.full(x.shape, "1.0"),
    "bytes": lambda x: np.full(x.shape, b"1.0"),
    "void": lambda x: filled(x, "V4"),
    "matrix": lambda x: np.atleast_2d(x).view(np.matrix),
    "masked": lambda x: np.ma.masked_array(x, mask=True),
    "recarray": lambda x: x.view(np.recarray),
    "complex": lambda x: x.astype(complex),
    "truths": lambda x: x.astype(bool),
    "integers": lambda x: x.astype(int),
    "one number": lambda x: np.array(1.0),
    "one axis more": lambda x: x[None],
    "empty": lambda x: x[:0],
    "too long": lambda x: np.concatenate([x, x]),
    "endless": lambda x: np.broadcast_to(np.float32(1), (10**7, 10**7)),
    "nan": lambda x: x * np.nan,
    "infinite": lambda x: x + np.inf,
    "huge": lambda x: x + np.float32(1e30),
    "archive": lambda x: np.load(io.BytesIO(npz(x))),
    "text": lambda x: ESCAPES,
    "long text": lambda x: LONG,
    "none": lambda x: None,
    "ragged": lambda x: [[1.0], [2.0, 3.0]],
    "nested": lambda x: {"x": [x]},
    "rude": lambda x: Rude(),
    "class": lambda x: Rude,
}
#: Honest arrays that look unusual: they count.
UNUSUAL: dict[str, Callable[[Array], Array]] = {
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "half": lambda x: x.astype(np.float16).astype(np.float32).astype(np.float16),
    "double": lambda x: x.astype(np.float64),
    "metadata": lambda x: x.astype(np.dtype(x.dtype, metadata={"a": 1})),
    "backwards": lambda x: x[::-1].copy()[::-1],
    "column by column": np.asfortranarray,
}

#: Bytes in place of NumPy's form of three floats.
BYTES: dict[str, bytes] = {
    "nothing": b"",
    "no header": b"\x93NUMPY",
    "cut off": npy(np.ones(3, np.float32))[:-1],
    "more": npy(np.ones(3, np.float32)) + b"more",
    "zip": npz(np.ones(3, np.float32)),
    "bomb": bomb(),
    "empty zip": b"PK\5\6" + bytes(18),
    "pickle": pickle.dumps(np.ones(3)),
    "pickled objects": npy(np.full(3, None)),
    "trillion": headed("(10**12,)"),
    "trillions": headed("(1000000000000,)"),
    "billions of nothing": headed("(10000000000,)", "'|V0'"),
    "more than any": headed(f"({2**70},)"),
    "less than none": headed("(-3,)", data=bytes(12)),
    "product beyond 64 bits": headed(f"({2**40}, {2**40})"),
    "a number's shape": headed("3", data=bytes(12)),
    "deep": headed("(" * 5000 + ")" * 5000),
    "long header": headed(f"(3,{' ' * 50_000})", data=bytes(12)),
    "code": headed("__import__('os').system('true')"),
    "version 9": headed("(3,)", data=bytes(12), version=b"\11\0"),
    "version 3": headed("(3,)", data=bytes(12), version=b"\3\0"),
    "no type": headed("(3,)", "'what'", bytes(12)),
    "many types": headed("(3,)", f"[{','.join(f'({i!r}, {4!r})' for i in 'abcdef')}]", bytes(12)),
    "text": LONG.encode(),
}

#: In place of a number that a client reports.
NUMBERS: dict[str, Any] = {
    "beyond any float": 10**400,
    "beyond any text": 10**5000,
    "nan": np.nan,
    "infinite": -np.inf,
    "text": ESCAPES,
    "number as text": "1.0",
    "long text": LONG,
    "bytes": b"1",
    "none": None,
    "true": True,
    "complex": 1 + 2j,
    "NumPy's complex": np.complex64(1),
    "NumPy's long": np.longdouble("1e4000"),
    "date": np.datetime64("2020-01-01"),
    "array": np.array([1, 2]),
    "array of one": np.ones(1),
    "list": [1.0],
    "nested": [[[[1]], {}]],
    "long list": [1.0] * 10**5,
    "mapping": {"a": 1},
    "set": {1},
    "rude": Rude(),
    "class": float,
    "endless": np.broadcast_to(1.0, (10**7, 10**7)),
}
#: Names that no array and no metric has.
NAMES: list[Any] = [ESCAPES, LONG, "", 7, 10**5000, None, (1, 2), b"x", 1.5]
