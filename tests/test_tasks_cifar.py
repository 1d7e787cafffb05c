"""CIFAR-10 in its authors' files, made here and tiny; pickles are read without running them."""

import io
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

from deltafl.errors import DeltaflError
from deltafl.tasks.cifar import PYTHON_MD5
from deltafl.tasks.datasets import load_dataset
from deltafl.tasks.registry import make_task

Bytes = npt.NDArray[np.uint8]


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTAFL_DATA", raising=False)


_Pickler: Any = pickle._Pickler  # the readable one, whose parts can be replaced


def as_pickle(image: Bytes, label: Bytes) -> bytes:
    """Bytes are written as Python 2 wrote its strings, which is what the published files hold."""
    file = io.BytesIO()
    writer = _Pickler(file, protocol=2)
    writer.dispatch = {
        **_Pickler.dispatch,
        bytes: lambda self, value: self.write(b"T" + struct.pack("<i", len(value)) + value),
    }
    writer.dump({b"data": image, b"labels": label.tolist(), b"batch_label": b"testing"})
    return file.getvalue()


def tiny_cifar() -> dict[str, tuple[Bytes, Bytes]]:
    """Two images a file, all different; the labels go around."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.integers(0, 256, (2, 3072), dtype=np.uint8), np.array([k, 9 - k], np.uint8))
        for k, name in enumerate(PYTHON_MD5)
    }


def as_binary(image: Bytes, label: Bytes) -> bytes:
    return np.column_stack([label, image]).tobytes()


def tar_of(mode: Literal["w:xz"]) -> bytes:
    """A small archive of noise, which is not cut where it is damaged."""
    file, noise = io.BytesIO(), np.random.default_rng(0).bytes(100_000)
    with tarfile.open(fileobj=file, mode=mode) as archive:
        info = tarfile.TarInfo("data_batch_1.bin")
        info.size = len(noise)
        archive.addfile(info, io.BytesIO(noise))
    return file.getvalue()


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def write_cifar(form: str, folder: Path) -> None:
    tiny = tiny_cifar()
    kind = "py" if "py" in form else "bin"
    files = (
        {name: as_pickle(*one) for name, one in tiny.items()}
        if kind == "py"
        else {f"{name}.bin": as_binary(*one) for name, one in tiny.items()}
    )
    if form.endswith(".tar.gz"):
        write_tar(folder / form, files)
    elif form.endswith(".npz"):
        x = {name: one[0].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) for name, one in tiny.items()}
        y = {name: one[1][:, None] for name, one in tiny.items()}  # Keras has labels (N, 1)
        train = [name for name in tiny if name != "test_batch"]
        arrays = {"x_train": [x[name] for name in train], "y_train": [y[name] for name in train]}
        joined = {key: np.concatenate(parts) for key, parts in arrays.items()}
        np.savez(folder / form, **joined, x_test=x["test_batch"], y_test=y["test_batch"])  # type: ignore[arg-type]
    else:
        (folder / form).mkdir()
        for name, content in files.items():
            (folder / form / name).write_bytes(content)


@pytest.mark.parametrize(
    ("form", "honest"),
    [
        ("cifar-10-batches-py", "other content than published"),
        ("cifar-10-python.tar.gz", "other content than published"),
        ("cifar-10-batches-bin", "not compared"),
        ("cifar-10-binary.tar.gz", "not compared"),
        ("cifar10.npz", "not compared"),
    ],
)
def test_all_forms_of_cifar10_hold_the_same(form: str, honest: str, tmp_path: Path) -> None:
    write_cifar(form, tmp_path)
    data = load_dataset("cifar10", tmp_path)
    image = np.concatenate([image for image, _ in tiny_cifar().values()]).reshape(-1, 3, 32, 32)
    assert np.array_equal(data.train_x, image[:10])
    assert np.array_equal(data.test_x, image[10:])
    assert data.train_y.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert data.test_y.tolist() == [5, 4]
    assert honest in data.name
    task = make_task("cifar10", seed=0, num_clients=3, data_dir=tmp_path)
    assert task.augment is not None
    assert (task.num_clients, task.dataset.num_classes) == (3, 10)


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    write_cifar("cifar-10-batches-py", tmp_path)
    trace = tmp_path / "trace"

    class Attack:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[Any, ...]]:
            return open, (str(trace), "w")

    for content in (
        pickle.dumps({b"data": Attack(), b"labels": [0]}, 2),
        pickle.dumps(np.zeros(2, object), 2),
        b"\x80",
    ):
        (tmp_path / "cifar-10-batches-py" / "data_batch_2").write_bytes(content)
        with pytest.raises(DeltaflError, match="data_batch_2 is not a file of CIFAR-10"):
            load_dataset("cifar10", tmp_path)
    assert not trace.exists()


def test_broken_files_of_cifar10_are_named(tmp_path: Path) -> None:
    write_cifar("cifar-10-batches-bin", tmp_path)
    file = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    for content, words in (
        (b"", "has 0 bytes"),
        (b"\x00" * 3000, "has 3000 bytes"),
        (b"\x0a" * 3073, "labels must be whole numbers from 0 to 9"),
    ):
        file.write_bytes(content)
        with pytest.raises(DeltaflError, match=rf"data_batch_3\.bin.*{words}"):
            load_dataset("cifar10", tmp_path)
    file.unlink()
    with pytest.raises(DeltaflError, match=r"cannot read .*data_batch_3\.bin"):
        load_dataset("cifar10", tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    write_tar(other / "cifar-10-binary.tar.gz", {"data_batch_1.bin": b"\x00" * 3073})
    with pytest.raises(DeltaflError, match=r"holds no file data_batch_2\.bin"):
        load_dataset("cifar10", other)
    whole = (other / "cifar-10-binary.tar.gz").read_bytes()
    for damaged in (b"no archive", whole[:12] + b"\xff" * 20 + whole[32:], whole[:-20]):
        (other / "cifar-10-binary.tar.gz").write_bytes(damaged)
        with pytest.raises(DeltaflError, match="is not a whole tar archive"):
            load_dataset("cifar10", other)
    xz = bytearray(tar_of("w:xz"))
    xz[len(xz) // 2] ^= 255
    (other / "cifar-10-binary.tar.gz").write_bytes(xz)
    with pytest.raises(DeltaflError, match="is not a whole tar archive"):
        load_dataset("cifar10", other)
