"""Tasks on archives that nobody publishes, made here and tiny: writers, packed JPEG, roles."""

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from deltafl.errors import DeltaflError
from deltafl.tasks import make_task
from reproduction.data import ARCHIVES, TINY_ALPHABET, load_unipen62, windows

Arrays = dict[str, npt.NDArray[Any]]


@pytest.fixture(autouse=True)
def no_data_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTAFL_DATA", raising=False)
    monkeypatch.setattr("reproduction.data._package_folders", lambda *_: [])
    for name, archive in ARCHIVES.items():
        monkeypatch.setitem(ARCHIVES, name, dict(archive))


def write(folder: Path, name: str, arrays: Arrays) -> None:
    """Write an archive, and take it for the known one."""
    path = folder / ARCHIVES[name]["file"]
    np.savez(path, **arrays)  # type: ignore[arg-type]
    ARCHIVES[name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()


def tiny_writers() -> Arrays:
    """Writers 3 (600 examples), 9 (60) and 5 (49); the top left pixel is the label, the next two
    the row.
    """
    writer = np.repeat(np.array([3, 9, 5], np.int16), [600, 60, 49])
    y = (np.arange(len(writer)) % 62).astype(np.uint8)
    x = np.zeros((len(writer), 28, 28), np.uint8)
    x[:, 0, 0] = y
    x[:, 0, 1] = np.arange(len(writer)) // 256
    x[:, 0, 2] = np.arange(len(writer)) % 256
    return {"x": x, "y": y, "writer": writer}


def test_unipen62_keeps_writers_of_50_and_the_first_500_of_each(tmp_path: Path) -> None:
    write(tmp_path, "unipen62", tiny_writers())
    task = make_task("unipen62", seed=0, data_dir=tmp_path)
    data = task.dataset
    assert [len(rows) for rows in task.client_rows] == [450, 54]
    assert np.bincount(data.columns["writer"])[[3, 9]].tolist() == [450, 54]
    assert data.test_x.shape == (56, 1, 28, 28)
    assert [str(data.train_x.dtype), str(data.train_y.dtype), data.num_classes] == [
        "uint8",
        "int64",
        62,
    ]
    # Images stay with their labels, and the test has rows 4, 14, ... of each writer's first 500.
    assert np.array_equal(data.train_x[:, 0, 0, 0], data.train_y)
    row = data.test_x[:, 0, 0, 1].astype(int) * 256 + data.test_x[:, 0, 0, 2]
    assert row.tolist() == [*range(4, 500, 10), *range(604, 660, 10)]
    assert np.array_equal(data.test_y, row % 62)
    assert data.name == "UNIPEN-62 by writer"
    assert "FEMNIST" not in data.name


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_missing_archive_names_the_file_and_the_folders(name: str, tmp_path: Path) -> None:
    with pytest.raises(DeltaflError) as caught:
        make_task(name, seed=0, data_dir=tmp_path)
    for words in (ARCHIVES[name]["file"], str(tmp_path), "cache", "DELTAFL_DATA"):
        assert words in str(caught.value)


def test_an_archive_of_other_content_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / ARCHIVES["unipen62"]["file"], **tiny_writers())  # type: ignore[arg-type]
    with pytest.raises(DeltaflError, match=r"unipen62_writers\.npz has other content"):
        load_unipen62(tmp_path)


def pack(images: npt.NDArray[np.uint8], prefix: str = "") -> Arrays:
    """Encode (N, height, width, 3) and pack: the longest common beginning once, the rest end to
    end.
    """
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
    return {
        "header": np.frombuffer(header, np.uint8),
        f"{prefix}scan": scan,
        f"{prefix}offsets": offsets,
    }


def flat_colours(num_images: int, side: int) -> npt.NDArray[np.uint8]:
    """Images of one colour each, with a white top row of 8 pixels; JPEG keeps those within a few
    steps.
    """
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
    write(tmp_path, "cifar10-jpeg", tiny_cifar())
    task = make_task("cifar10-jpeg", seed=0, data_dir=tmp_path, num_clients=4)
    data = task.dataset
    images = flat_colours(26, 32).transpose(0, 3, 1, 2).astype(int)
    assert data.train_x.shape == (20, 3, 32, 32)
    assert np.abs(data.train_x - images[:20]).max() <= 4
    assert np.abs(data.test_x - images[20:]).max() <= 4
    assert data.test_y.tolist() == [0, 1, 2, 3, 4, 5]
    assert [len(rows) for rows in task.client_rows] == [5] * 4
    assert data.name == "CIFAR-10 recompressed as JPEG"


def test_celeba_subset_has_a_client_for_each_person_of_five_images_at_half_the_resolution(
    tmp_path: Path,
) -> None:
    write(tmp_path, "celeba-subset", tiny_celeba())
    task = make_task("celeba-subset", seed=0, data_dir=tmp_path)
    data = task.dataset
    full = flat_colours(24, 84).transpose(0, 3, 1, 2).astype(int)
    images = (
        full[..., ::2, ::2] + full[..., 1::2, ::2] + full[..., ::2, 1::2] + full[..., 1::2, 1::2]
    ) / 4
    assert images.shape == (24, 3, 42, 42)
    # Person 7 has rows 4 to 18, of which the 5th and the 15th are for the test; person 30 has rows
    # 19 to 23.
    test = [8, 18, 23]
    train = [row for row in range(4, 24) if row not in test]
    assert np.abs(data.test_x - images[test]).max() <= 4
    assert np.abs(data.train_x - images[train]).max() <= 4
    assert data.test_y.tolist() == [0, 0, 1]
    assert data.columns["celeb"].tolist() == [7] * 13 + [30] * 4
    assert [rows.tolist() for rows in task.client_rows] == [[*range(13)], [13, 14, 15, 16]]
    assert (data.num_classes, data.name) == (2, "subset of CelebA by celebrity")


def write_roles(folder: Path) -> None:
    """Roles with 1,000, 999 and 1,200 characters; the letters count up, so every window tells
    where it starts.
    """
    length = [1000, 999, 1200]
    letters = np.frombuffer(TINY_ALPHABET[12:].encode(), np.uint8)
    text = np.concatenate([letters[(k + np.arange(n)) % 53] for k, n in enumerate(length)])
    offsets = np.concatenate([[0], np.cumsum(length)])
    role = np.array(["ROMEO", "NURSE", "JULIET"])
    write(folder, "tinyshakespeare", {"text": text, "offsets": offsets, "role": role})


def test_windows_against_a_slow_reference() -> None:
    token = np.arange(137, dtype=np.uint8)
    x, y = windows(token)
    starts = range(0, 137 - 80, 10)
    assert x.tolist() == [token[start : start + 80].tolist() for start in starts]
    assert y.tolist() == [start + 80 for start in starts]
    assert [len(windows(token[:length])[1]) for length in (80, 81, 90, 91)] == [0, 1, 1, 2]


def test_a_role_is_cut_in_time_and_short_roles_are_left_out(tmp_path: Path) -> None:
    write_roles(tmp_path)
    task = make_task("tinyshakespeare", seed=0, data_dir=tmp_path, partition="natural")
    data = task.dataset
    assert (str(data.train_x.dtype), data.train_x.shape[1], data.num_classes) == ("uint8", 80, 65)
    # 800 and 960 characters for training, 200 and 240 for the test.
    assert [len(rows) for rows in task.client_rows] == [72, 88]
    assert task.test_clients is not None
    assert task.test_clients.tolist() == [0] * 12 + [1] * 16
    first = 12 + np.arange(160) % 53  # letters go around 53 characters
    assert data.train_x[0].tolist() == first[:80].tolist()
    assert data.train_x[1].tolist() == first[10:90].tolist()
    assert data.train_y[:2].tolist() == [first[80], first[90]]
    assert data.test_x[0, 0] == 12 + 800 % 53
    assert data.name == "tiny Shakespeare by role"


def tiny_mnist() -> Arrays:
    arrays: Arrays = {"train_writer": np.repeat(np.array([2100, 7, 5], np.int16), 10)}
    for name, number in (("train", 30), ("test", 20)):
        arrays |= {
            f"{name}_x": np.zeros((number, 28, 28), np.uint8),
            f"{name}_y": np.arange(number, dtype=np.uint8) % 10,
        }
    return arrays


def test_mnist_with_writers(tmp_path: Path) -> None:
    np.savez(tmp_path / "mnist_writers.npz", **tiny_mnist())  # type: ignore[arg-type]
    task = make_task("mnist", seed=0, data_dir=tmp_path, partition="writer")
    assert task.dataset.train_x.shape == (30, 1, 28, 28)
    assert [rows.tolist() for rows in task.client_rows] == [
        [*range(20, 30)],
        [*range(10, 20)],
        [*range(10)],
    ]
    assert "mnist_writers.npz" in task.dataset.name


def test_mnist_without_writers_is_the_packages(tmp_path: Path) -> None:
    with pytest.raises(DeltaflError, match="'deltafl data fetch mnist'"):
        make_task("mnist", seed=0, data_dir=tmp_path)
