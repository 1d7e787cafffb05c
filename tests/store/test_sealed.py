"""A sealed file: what is written is read, others can read it too, and no damage goes unnoticed."""

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from deltafl import DeltaflError
from deltafl.store import sealed
from deltafl.store.sealed import read_header, read_sealed, write_sealed
from deltafl.types import Array

HEADER = {"round": 3, "clients": {"a": 1.5}, "none": None}
NAMES = ("float64", "uint8", "int8", "uint32", "uint64", "float16", "bool")
ARRAYS: dict[str, Array] = {name: np.arange(5).astype(name) for name in NAMES}
ARRAYS |= {"scalar": np.array(2.5), "empty": np.zeros((0, 3)), "turned": np.eye(3)[::-1].T}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_sealed(tmp_path / "file", ARRAYS, HEADER)
    return tmp_path / "file"


@pytest.mark.parametrize("mapped", [False, True])
def test_what_is_written_is_read(
    file: Path,
    mapped: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sealed, "LARGEST_COPY", 0)
    content = file.read_bytes()
    arrays, header = read_sealed(file, "", mapped)
    assert header == read_header(file, "") == HEADER
    others = load_file(file)
    for name, array in ARRAYS.items():
        for found in (arrays[name], others[name]):
            assert (found.dtype, found.tolist()) == (array.dtype, array.tolist())
    arrays["float64"][0] = 7  # stays in memory
    assert file.read_bytes() == content
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("type", [">f8", ">f4", ">f2", ">i8", ">i2", ">u4", ">u1"])
def test_arrays_with_their_bytes_in_the_other_order_are_written(type: str, tmp_path: Path) -> None:
    array = np.arange(6).astype(type).reshape(2, 3)
    write_sealed(tmp_path / "file", {"a": array})
    for found in (read_sealed(tmp_path / "file", "")[0]["a"], load_file(tmp_path / "file")["a"]):
        assert found.dtype.isnative and found.tolist() == array.tolist()


def test_a_type_that_no_file_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeltaflError, match="a has type complex128, which a file of arrays does"):
        write_sealed(tmp_path / "other", {"a": np.zeros(5, dtype=complex)})
    assert not (tmp_path / "other").exists()


def test_every_flipped_bit_and_every_cut_is_refused(
    file: Path, pytestconfig: pytest.Config
) -> None:
    content = file.read_bytes()
    # Every third place has each of the eight bits, and each byte of a number.
    step = 1 if pytestconfig.getoption("--thorough") else 3
    length = 8 + int.from_bytes(content[:8], "little")
    for place in range(0, len(content), step):
        if content[place : place + 1] == b" ":
            continue  # between entries of JSON another blank means the same
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        for bad in (bytes(damaged), content[:place]):
            file.write_bytes(bad)
            with pytest.raises(DeltaflError, match=r"file is not as it was written.*: put it back"):
                read_sealed(file, "put it back")
            if place < length:
                with pytest.raises(DeltaflError):
                    read_header(file, "put it back")


@pytest.mark.parametrize("head", [b"[]", b"{}", b"[" * 10_000, b'{"__metadata__": 3}', b"\xff"])
def test_files_of_others_are_refused(file: Path, head: bytes) -> None:
    file.write_bytes(len(head).to_bytes(8, "little") + head)
    for read in (read_sealed, read_header):
        with pytest.raises(DeltaflError, match="or another version wrote it: put it back"):
            read(file, "put it back")


def test_what_was_read_stays_when_the_file_is_written_over(file: Path) -> None:
    """By ``cp``, which writes in place, or cut off: that would end a process that maps it."""
    arrays, _ = read_sealed(file, "", mapped=True)
    content = file.read_bytes()
    file.write_bytes(bytes(len(content)))
    assert arrays["float64"].tolist() == [0, 1, 2, 3, 4]
    os.truncate(file, 0)
    assert arrays["float64"].tolist() == [0, 1, 2, 3, 4]
