"""Tasks on images: clothes split by kind, and archives with writers or packed JPEG, made here and tiny."""

import io
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafl.errors import DeltaflError, MissingExtraError
from deltafl.tasks.datasets import load_dataset
from deltafl.tasks.download import check, fetch
from deltafl.tasks.images import read_arrays, split_owners
from deltafl.tasks.registry import make_task
from deltafl.tasks.sources import ARCHIVES, SOURCES

Arrays = dict[str, npt.NDArray[Any]]

#: Where a developer keeps the real archives; read before the fixture hides it.
REAL = os.environ.get("DELTAFL_DATA")


def real(name: str) -> pytest.MarkDecorator:
    there = REAL is not None and (Path(REAL) / ARCHIVES[name].file).is_file()
    return pytest.mark.skipif(not there, reason=f"DELTAFL_DATA holds no {ARCHIVES[name].file}")


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache and no environment of the person who runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTAFL_DATA", raising=False)


def write(folder: Path, name: str, arrays: Arrays, **changed: npt.NDArray[Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ARCHIVES[name].file
    np.savez(path, **(arrays | changed))  # type: ignore[arg-type]
    return path


def tiny_writers() -> Arrays:
    """Writers 3 (600 examples), 9 (60) and 5 (49); the top left pixel is the label, the next two the row."""
    writer = np.repeat(np.array([3, 9, 5], np.int16), [600, 60, 49])
    y = (np.arange(len(writer)) % 62).astype(np.uint8)
    x = np.zeros((len(writer), 28, 28), np.uint8)
    x[:, 0, 0] = y
    x[:, 0, 1], x[:, 0, 2] = np.arange(len(writer)) // 256, np.arange(len(writer)) % 256
    return {"x": x, "y": y, "writer": writer}


@pytest.mark.skipif(
    not SOURCES["fashion-mnist"].system_folders[0].is_dir(), reason="Debian's data set is not installed"
)
def test_split_fashion_mnist_has_the_papers_clients() -> None:
    task = make_task("split-fashion-mnist", seed=0)
    assert [len(rows) for rows in task.client_rows] == [6000] * 9 + [60] * 100
    assert {len(np.unique(task.dataset.train_y[rows])) for rows in task.client_rows} == {1}
    assert len({int(task.dataset.train_y[rows[0]]) for rows in task.client_rows[8:]}) == 2
    assert (task.name, task.dataset.name) == ("split-fashion-mnist", "fashion-mnist")


def test_split_fashion_mnist_asks_for_the_files_of_fashion_mnist() -> None:
    if not SOURCES["fashion-mnist"].system_folders[0].is_dir():
        with pytest.raises(DeltaflError, match="'deltafl data fetch fashion-mnist'"):
            make_task("split-fashion-mnist", seed=0)
    with pytest.raises(DeltaflError, match="did you mean 'fashion-mnist'"):
        load_dataset("split-fashion-mnist")


def test_unipen62_keeps_writers_of_50_and_the_first_500_of_each(tmp_path: Path) -> None:
    path = write(tmp_path, "unipen62", tiny_writers())
    task = make_task("unipen62", seed=0, data_dir=tmp_path)
    data = task.dataset
    assert [len(rows) for rows in task.client_rows] == [450, 54]
    assert np.bincount(data.columns["writer"])[[3, 9]].tolist() == [450, 54]
    assert data.test_x.shape == (56, 1, 28, 28)
    assert [str(data.train_x.dtype), str(data.train_y.dtype), data.num_classes] == ["uint8", "int64", 62]
    # Images stay with their labels, and the test has rows 4, 14, ... of each writer's first 500.
    assert np.array_equal(data.train_x[:, 0, 0, 0], data.train_y)
    row = data.test_x[:, 0, 0, 1].astype(int) * 256 + data.test_x[:, 0, 0, 2]
    assert row.tolist() == [*range(4, 500, 10), *range(604, 660, 10)]
    assert np.array_equal(data.test_y, row % 62)
    assert data.name == f"UNIPEN-62 by writer (other content than known: {path})"
    assert "FEMNIST" not in data.name


@given(st.lists(st.integers(0, 6), max_size=120), st.integers(1, 8), st.none() | st.integers(1, 30))
def test_split_owners_against_a_slow_reference(owners: list[int], fewest: int, most: int | None) -> None:
    train, test = split_owners(np.array(owners, np.int64), fewest, most)
    seen = dict.fromkeys(owners, 0)
    expected: dict[bool, list[int]] = {False: [], True: []}
    for row, owner in enumerate(owners):
        if owners.count(owner) >= fewest and (most is None or seen[owner] < most):
            expected[seen[owner] % 10 == 4].append(row)
        seen[owner] += 1
    assert train.tolist() == expected[False]
    assert test.tolist() == expected[True]


@real("unipen62")
def test_the_real_unipen62() -> None:
    assert REAL is not None
    task = make_task("unipen62", seed=0, data_dir=Path(REAL))
    assert task.dataset.name == "UNIPEN-62 by writer"
    assert task.num_clients == 278
    sizes = [len(rows) for rows in task.client_rows]
    assert (min(sizes) >= 45, max(sizes)) == (True, 450)
    assert set(np.unique(task.dataset.test_y)) == set(range(62))


def test_a_missing_archive_says_which_file_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, environment = tmp_path / "data", tmp_path / "environment"
    data.mkdir()
    environment.mkdir()
    monkeypatch.setenv("DELTAFL_DATA", str(environment))
    for name, archive in ARCHIVES.items():
        with pytest.raises(DeltaflError) as caught:
            make_task(name, seed=0, data_dir=data)
        message = str(caught.value)
        for words in (archive.file, str(data), str(environment), str(tmp_path / "cache"), "DELTAFL_DATA"):
            assert words in message
        with pytest.raises(DeltaflError, match=f"{archive.file}, that is published nowhere"):
            fetch(name)
        assert check(name) == [(archive.file, None, "missing")]
    with pytest.raises(DeltaflError, match="nowhere, which is not a folder"):
        load_dataset("unipen62", tmp_path / "nowhere")
    with pytest.raises(DeltaflError, match="did you mean 'unipen62'"):
        load_dataset("unipen")


@pytest.mark.parametrize("place", ["data/unipen62", "environment", "cache/deltafl/unipen62"])
def test_an_archive_is_found_in_every_place(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("data", "environment"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("DELTAFL_DATA", str(tmp_path / "environment"))
    path = write(tmp_path / place, "unipen62", tiny_writers())
    assert str(path) in load_dataset("unipen62", tmp_path / "data").name


def test_broken_writers_are_named(tmp_path: Path) -> None:
    whole = tiny_writers()
    changes: list[tuple[str, npt.NDArray[Any], str]] = [
        ("x", whole["x"].astype(np.float32), r"x is float32 \(709, 28, 28\)"),
        ("x", whole["x"][:, :20], r"needs uint8 \(N, 28, 28\)"),
        ("x", whole["x"][:700], "needs uint8 for 700 images"),
        ("y", whole["y"] + np.uint8(1), "labels from 0 to 61"),
        ("writer", whole["writer"][:3], "needs 709 whole numbers"),
        ("writer", whole["writer"] * 0.5, "needs 709 whole numbers"),
        ("writer", np.arange(709), "no writer has 50 examples or more"),
        ("y", np.array([None]), "is not an archive with the arrays x, y, writer"),
    ]
    for key, array, words in changes:
        write(tmp_path, "unipen62", whole, **{key: array})
        with pytest.raises(DeltaflError, match=rf"unipen62_writers\.npz.*{words}"):
            load_dataset("unipen62", tmp_path)
    path = tmp_path / ARCHIVES["unipen62"].file
    np.savez(path, x=whole["x"])
    with pytest.raises(DeltaflError, match="is not an archive with the arrays"):
        load_dataset("unipen62", tmp_path)
    np.save(tmp_path / "x.npy", whole["x"])
    for content in (b"", b"PK not a zip", path.read_bytes()[:-100], (tmp_path / "x.npy").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(DeltaflError, match="is not an archive with the arrays"):
            load_dataset("unipen62", tmp_path)


def npz(shape: str) -> bytes:
    """An archive whose array ``x`` has a header of its own."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"abc")
    return file.getvalue()


def changed(content: bytes, local: int, central: int, value: int) -> bytes:
    """The archive with another byte in the header of its file, and in that of the directory."""
    new = bytearray(content)
    new[local] = new[content.index(b"PK\x01\x02") + central] = value
    return bytes(new)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (npz(f"({10**15},)"), "Unable to allocate 909"),
        (npz(f"({2**70},)"), ""),
        (npz("('"), ""),
        (npz("(3,"), ""),
        (changed(npz("(3,)"), 6, 8, 1), "encrypted"),
        (changed(npz("(3,)"), 8, 10, 99), "compression method is not supported"),
        (changed(npz("(3,)"), 8, 10, 14), ""),  # no LZMA
    ],
)
def test_archives_of_any_damage_are_one_sentence(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(npz("(3,)"))
    assert read_arrays(path)["x"].tobytes() == b"abc"
    path.write_bytes(content)
    with pytest.raises(DeltaflError, match=rf"x\.npz is not an NPZ file of plain arrays: .*{words}"):
        read_arrays(path)


def pack(images: npt.NDArray[np.uint8], prefix: str = "") -> Arrays:
    """Encode (N, height, width, 3) and pack: the longest common beginning once, the rest end to end."""
    image_module = pytest.importorskip("PIL.Image")
    files = []
    for image in images:
        file = io.BytesIO()
        image_module.fromarray(image).save(file, "JPEG", quality=95, subsampling=0)
        files.append(file.getvalue())
    header = files[0][: files[0].index(b"\xff\xda")]  # up to the marker of the compressed data
    assert all(file.startswith(header) for file in files)
    rest = [file[len(header) :] for file in files]
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in rest])])
    scan = np.frombuffer(b"".join(rest), np.uint8)
    return {"header": np.frombuffer(header, np.uint8), f"{prefix}scan": scan, f"{prefix}offsets": offsets}


def flat_colours(num_images: int, side: int) -> npt.NDArray[np.uint8]:
    """Images of one colour each, with a white top row of 8 pixels; JPEG keeps those within a few steps."""
    colour = np.random.default_rng(0).integers(0, 200, (num_images, 1, 1, 3), dtype=np.uint8)
    images = np.broadcast_to(colour, (num_images, side, side, 3)).copy()
    images[:, :8] = 255
    return images


def tiny_cifar() -> Arrays:
    images = flat_colours(26, 32)
    labels = (np.arange(26) % 10).astype(np.uint8)
    packed = pack(images[:20], "train_") | pack(images[20:], "test_")
    return packed | {"train_y": labels[:20], "test_y": labels[20:]}


def tiny_celeba() -> Arrays:
    """People 40 (4 images, too few), 7 (15) and 30 (5), one after the other."""
    celeb = np.repeat(np.array([40, 7, 30], np.int32), [4, 15, 5])
    return pack(flat_colours(24, 84)) | {"y": (np.arange(24) % 2).astype(np.uint8), "celeb": celeb}


def test_cifar10_jpeg_is_decoded_and_named_honestly(tmp_path: Path) -> None:
    path = write(tmp_path, "cifar10-jpeg", tiny_cifar())
    task = make_task("cifar10-jpeg", seed=0, data_dir=tmp_path, num_clients=4)
    data, images = task.dataset, flat_colours(26, 32).transpose(0, 3, 1, 2).astype(int)
    assert data.train_x.shape == (20, 3, 32, 32)
    assert np.abs(data.train_x - images[:20]).max() <= 4
    assert np.abs(data.test_x - images[20:]).max() <= 4
    assert data.test_y.tolist() == [0, 1, 2, 3, 4, 5]
    assert [len(rows) for rows in task.client_rows] == [5] * 4
    assert data.name == f"CIFAR-10 recompressed as JPEG (other content than known: {path})"


def test_celeba_subset_has_a_client_for_each_person_of_five_images(tmp_path: Path) -> None:
    write(tmp_path, "celeba-subset", tiny_celeba())
    task = make_task("celeba-subset", seed=0, data_dir=tmp_path)
    data, images = task.dataset, flat_colours(24, 84).transpose(0, 3, 1, 2).astype(int)
    # Person 7 has rows 4 to 18, of which the 5th and the 15th are for the test; person 30 has rows 19 to 23.
    test = [8, 18, 23]
    train = [row for row in range(4, 24) if row not in test]
    assert np.abs(data.test_x - images[test]).max() <= 4
    assert np.abs(data.train_x - images[train]).max() <= 4
    assert data.test_y.tolist() == [0, 0, 1]
    assert data.columns["celeb"].tolist() == [7] * 13 + [30] * 4
    assert [rows.tolist() for rows in task.client_rows] == [[*range(13)], [13, 14, 15, 16]]
    assert (data.num_classes, data.name.split(" (")[0]) == (2, "subset of CelebA by celebrity")


def test_images_are_decoded_once_and_a_broken_cache_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = tiny_cifar()
    write(tmp_path, "cifar10-jpeg", arrays)
    first = load_dataset("cifar10-jpeg", tmp_path)
    cache = sorted((tmp_path / "cache" / "deltafl" / "cifar10-jpeg").iterdir())
    assert [file.suffix for file in cache] == [".npy", ".npy"]  # nothing half written is left
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "PIL", None)
        assert np.array_equal(load_dataset("cifar10-jpeg", tmp_path).train_x, first.train_x)
        for content in (b"", b"no array", cache[1].read_bytes()[:-1]):
            cache[1].write_bytes(content)
            with pytest.raises(MissingExtraError, match=r"'pillow': pip install 'deltafl\[sim\]'"):
                load_dataset("cifar10-jpeg", tmp_path)
    assert np.array_equal(load_dataset("cifar10-jpeg", tmp_path).train_x, first.train_x)
    # Another archive in the same place has other images, whatever the cache holds.
    write(tmp_path, "cifar10-jpeg", arrays | pack(flat_colours(20, 32)[::-1], "train_"))
    assert np.array_equal(load_dataset("cifar10-jpeg", tmp_path).train_x, first.train_x[::-1])


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "cifar10-jpeg", tiny_cifar())
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert len(load_dataset("cifar10-jpeg", tmp_path).train_x) == 20
    assert "cannot be kept" in caplog.text


def test_broken_packed_images_are_named(tmp_path: Path) -> None:
    whole = tiny_cifar()
    offsets, scan = whole["train_offsets"], whole["train_scan"]
    swapped = offsets.copy()
    swapped[[4, 5]] = swapped[[5, 4]]
    cut = np.delete(scan, slice(offsets[3] + 20, offsets[4]))
    shorter = offsets - np.where(np.arange(21) > 3, offsets[4] - offsets[3] - 20, 0)
    changes: list[tuple[Arrays, str]] = [
        ({"train_offsets": offsets[:-1]}, "needs 21 whole numbers for 20 labels"),
        ({"train_offsets": offsets * 1.0}, "offsets are float64"),
        ({"train_offsets": swapped}, "offsets must rise from 0 to"),
        ({"train_offsets": offsets - 1}, "offsets must rise from 0 to"),
        ({"train_scan": scan[:-1]}, "offsets must rise from 0 to"),
        ({"train_scan": cut, "train_offsets": shorter}, "image 3 cannot be decoded"),
        ({"header": whole["header"][2:]}, "image 0 cannot be decoded"),
        ({"header": whole["header"].astype(np.int64)}, "must be uint8"),
        (pack(flat_colours(20, 24), "train_"), "24 x 24 pixels, needs 32 x 32"),
        ({"train_y": whole["train_y"] + np.uint8(1)}, "labels from 0 to 9"),
        ({"train_y": np.array(3, np.uint8)}, r"labels are uint8 \(\)"),
    ]
    for changed, words in changes:
        path = write(tmp_path, "cifar10-jpeg", whole, **changed)
        with pytest.raises(DeltaflError, match=words) as caught:
            load_dataset("cifar10-jpeg", tmp_path)
        assert str(path) in str(caught.value)


@real("celeba-subset")
def test_the_real_celeba_subset() -> None:
    assert REAL is not None
    task = make_task("celeba-subset", seed=0, data_dir=Path(REAL))
    assert task.dataset.name == "subset of CelebA by celebrity"
    assert task.num_clients == 278
    assert len(task.dataset.train_x) + len(task.dataset.test_x) == 6229
    assert min(len(rows) for rows in task.client_rows) >= 4


@real("cifar10-jpeg")
def test_the_real_cifar10_jpeg_has_the_published_channel_means() -> None:
    assert REAL is not None
    data = load_dataset("cifar10-jpeg", Path(REAL))
    assert data.name == "CIFAR-10 recompressed as JPEG"
    assert data.train_x.mean((0, 2, 3)) / 255 == pytest.approx([0.4914, 0.4822, 0.4465], abs=3e-4)
    assert set(np.bincount(data.train_y)) == {5000}
