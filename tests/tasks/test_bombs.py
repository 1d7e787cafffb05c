"""Small files that say they are large, in a process with little memory: each ends in a sentence."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = r"""
import gzip, io, json, resource, sys, tarfile, zlib
from pathlib import Path
import numpy as np, pandas, pyarrow, pyarrow.parquet, h5py
from PIL import Image
from deltafl import DeltaflError
from deltafl.store import read_json, read_toml
from deltafl.store.sealed import read_sealed
from deltafl.tasks.data.files import read_arrays
from deltafl.tasks.data.frames import read_frame
from deltafl.tasks.data.images import load_cifar10, read_idx
from deltafl.tasks.data.leaf import _face, load_femnist

here = Path(sys.argv[1])
LARGE = 2**32

def gzipped(name, part, times):
    with gzip.open(here / name, "wb", compresslevel=1) as file:
        for _ in range(times):
            file.write(part)

def sparse(name, start=b""):
    with open(here / name, "wb") as file:
        file.write(start)
        file.truncate(LARGE)

gzipped("t.csv.gz", b"a,b\n" + b"1,2\n" * 2**18, 700)
gzipped("line.csv.gz", b"1" * 2**20, 700)
gzipped("idx.gz", bytes([0, 0, 8, 1]) + bytes(2**20), 700)
gzipped("cifar-10-binary.tar.gz", tarfile.TarInfo("x").tobuf(), 1)
header = tarfile.TarInfo("x"); header.size = LARGE
with gzip.open(here / "cifar-10-binary.tar.gz", "wb", compresslevel=1) as file:
    file.write(header.tobuf())
    for _ in range(700):
        file.write(bytes(2**20))
table = pyarrow.table({"a": pyarrow.array(np.zeros(2**24)).dictionary_encode()})
with pyarrow.parquet.ParquetWriter(here / "t.parquet", table.schema) as writer:
    for _ in range(6):
        writer.write_table(table)
np.savez_compressed(here / "t.npz", x=np.zeros(2**27, np.float64)[:2**27])
for name in ("t.csv", "t.toml", "t.json", "t.safetensors"):
    sparse(name, b"[" if name == "t.json" else b"")
sparse("long.safetensors", (LARGE - 8).to_bytes(8, "little"))
(here / "deep.json").write_text("[" * 10**6)
(here / "deep.toml").write_text("a = " + "[" * 10**5)
head = np.lib.format.header_data_from_array_1_0(np.zeros(1)) | {"shape": (10**13,)}
with open(here / "t.npy", "wb") as file:
    np.lib.format.write_array_header_1_0(file, head)
Image.new("1", (20000, 20000)).save(here / "t.png")
with h5py.File(here / "fed_emnist_train.h5", "w") as file:
    file.create_dataset("examples/f0/pixels", (10**7, 28, 28), np.float32, chunks=True)
    file.create_dataset("examples/f0/label", (10**7,), np.int32, chunks=True)
(here / "fed_emnist_test.h5").write_bytes((here / "fed_emnist_train.h5").read_bytes())
import os
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 5 * 10**8,) * 2)
failed = 0
for name, read in {
    **{name: lambda path: read_frame(path, None, None, ()) for name in
       ("t.csv.gz", "line.csv.gz", "t.parquet", "t.npz", "t.csv")},
    "idx.gz": read_idx, "cifar-10-binary.tar.gz": lambda _: load_cifar10(here),
    "t.toml": read_toml, "deep.toml": read_toml, "t.json": read_json, "deep.json": read_json,
    "t.safetensors": lambda path: read_sealed(path, "x"),
    "long.safetensors": lambda path: read_sealed(path, "x"),
    "t.npy": lambda path: read_arrays(path, ("x",)), "t.png": _face,
    "fed_emnist_train.h5": lambda _: load_femnist(here),
}.items():
    try:
        read(here / name)
    except DeltaflError as error:
        assert name in str(error) or "FEMNIST" in str(error), str(error)
    except BaseException as error:
        failed += 1
        print(name, type(error).__name__, str(error)[:200])
    else:
        failed += name != "t.png"
        print(name, "was read")
sys.exit(failed)
"""


@pytest.mark.thorough
def test_a_bomb_ends_in_a_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
