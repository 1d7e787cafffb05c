"""Tasks on data sets that are published nowhere, registered in ``deltafl.tasks``; their owner
brings the files. One more comes with a package: ``movielens.py``.

Each data set is one NumPy archive, looked for as in ``deltafl.tasks.data.files``. What they hold,
by the names of the arrays (N examples; uint8 unless another type is given):

- ``unipen62_writers.npz``: ``x`` (N, 28, 28), ink 255 on 0; ``y`` (N,), labels 0 to 61 for 0-9,
  A-Z, a-z; ``writer`` (N,), whole numbers. Handwriting from pen trajectories (Guyon et al., UNIPEN,
  ICPR 1994) in the classes of FEMNIST, for which it stands in; reports must not call it FEMNIST.
- ``cifar10_jpeg.npz``: CIFAR-10, recompressed as JPEG, hence not its pixels. ``header``,
  ``train_scan`` and ``train_offsets`` are 32 x 32 images whose common header is stored once,
  ``train_y`` (N,) their labels 0 to 9; the same with ``test_``.
- ``celeba_smiling_84.npz``: some of CelebA's faces. ``header``, ``scan`` and ``offsets`` are 84 x
  84 images, ``y`` (N,) is 1 for a smile and 0 for none, ``celeb`` (N,) the person, whole numbers.
- ``tinyshakespeare_roles.npz``: ``text`` (the bytes of all roles, end to end), ``offsets`` int64
  (roles + 1,) where each starts, ``role`` their names. It is a small part of Shakespeare, and roles
  of one name in different plays are one role; so it is not LEAF's data set.
- ``mnist_writers.npz``: ``train_x``, ``train_y``, ``test_x``, ``test_y``, MNIST, and
  ``train_writer`` (60,000,), whole numbers. The task ``mnist`` reads it in place of MNIST's own
  files where it is found.
"""

import hashlib
import importlib.util
import io
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafl import DeltaflError, tasks
from deltafl.errors import require
from deltafl.store import read_toml
from deltafl.types import IntArray

#: ``unipen62``: writers with fewer examples are left out, and of one with more only the first ones
#: are used.
FEWEST_OF_WRITER = 50
MOST_OF_WRITER = 500
#: ``celeba-subset``: people with fewer images are left out, as LEAF does.
FEWEST_OF_CELEBRITY = 5
#: Of each owner's examples the 5th, 15th, 25th, ... are for the test.
TEST_EVERY = 10
TEST_FIRST = 4
#: The characters of ``tinyshakespeare``, in the order of their codes.
TINY_ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
#: Characters that the model sees, and how far apart windows of ``tinyshakespeare`` start.
WINDOW = 80
STRIDE = 10
#: ``tinyshakespeare``: roles with fewer characters are left out; of the others this share is for
#: training.
FEWEST_OF_ROLE = 1000
TRAIN_SHARE = 0.8
ARCHIVES: dict[str, dict[str, str]] = read_toml(
    Path(__file__).with_name("archives.toml"), users=True
)
Bytes = npt.NDArray[np.uint8]


def read_archive(name: str, data_dir: Path | None) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an archive, which is the one that recorded runs read."""
    return dict(np.load(find_archive(name, data_dir), allow_pickle=False))


def find_archive(name: str, data_dir: Path | None) -> Path:
    """The file of a data set, which is the one that recorded runs read."""
    archive = ARCHIVES[name]
    folders = tasks.data_folders(name, data_dir)
    origin = "is published nowhere"
    cure = "give its folder as data_dir or DELTAFL_DATA"
    if "package" in archive:
        folders += _package_folders(archive["package"], archive["folder"])
        origin = f"is part of the package {archive['package']}"
        cure = f"write pip install '{archive['package']}=={archive['version']}', or {cure}"
    path = _found(archive["file"], folders)
    if path is None:
        raise DeltaflError(
            f"{name} needs the file {archive['file']}, which {origin} and not in "
            f"{', '.join(map(str, folders))}: {cure}"
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # It takes the place of checks: an archive that is whole has the arrays above.
    if digest != archive["sha256"]:
        raise DeltaflError(
            f"{path} has other content than the archive of the recorded runs, SHA-256 {digest}; "
            "use that one"
        )
    return path


def _package_folders(package: str, folder: str) -> list[Path]:
    """The folder of an installed package, which is not imported; none if it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return []
    return [Path(place) / folder for place in spec.submodule_search_locations or ()]


def _found(file: str, folders: Sequence[Path]) -> Path | None:
    return next((folder / file for folder in folders if (folder / file).is_file()), None)


def load_unipen62(data_dir: Path | None = None) -> tasks.Dataset:
    """Handwriting by writer; the column of owners is ``writer``."""
    found = read_archive("unipen62", data_dir)
    image = found["x"][:, np.newaxis]
    label = found["y"].astype(np.int64)
    title = ARCHIVES["unipen62"]["title"]
    whole = tasks.Dataset.whole(title, image, label, num_classes=62)
    writer = found["writer"].astype(np.int64)
    return hold_out_by_owner(whole, "writer", writer, FEWEST_OF_WRITER, MOST_OF_WRITER)


def hold_out_by_owner(
    whole: tasks.Dataset,
    column: str,
    owner_e: IntArray,
    fewest: int = 1,
    most: int | None = None,
) -> tasks.Dataset:
    """Cut a test set from the examples of each owner; deterministic, hence the same for every seed.

    Owners (``owner_e``, int64 (N,)) with fewer than ``fewest`` of the training examples in
    ``whole`` are left out; of the others the first ``most`` are used, all if None. Of these the
    5th, 15th, 25th, ... are for the test.

    Raises:
        DeltaflError: If no owner has an example for the test.
    """
    used = [rows[:most] for rows in tasks.rows_by_key(owner_e) if len(rows) >= fewest]
    test_e = np.zeros(len(owner_e), np.bool_)
    for rows in used:
        test_e[rows[TEST_FIRST::TEST_EVERY]] = True
    if not test_e.any():
        raise DeltaflError(
            f"{whole.name}: no {column} has {max(fewest, TEST_FIRST + 1)} examples or more"
        )
    row_e = np.sort(np.concatenate(used))
    # Rows of owners that are left out are in neither part.
    train = row_e[~test_e[row_e]]
    return replace(whole, columns={column: owner_e}).split(train, np.flatnonzero(test_e))


def load_celeba_subset(data_dir: Path | None = None, side: int = 42) -> tasks.Dataset:
    """Faces by celebrity, at half their resolution or with 84 x 84 pixels; the column of owners
    is ``celeb``.
    """
    found = read_archive("celeba-subset", data_dir)
    label = found["y"].astype(np.int64)
    full = _unpack("celeba-subset", found, "", 84)
    scale = 84 // side
    block_sum = full.reshape(len(full), 3, side, scale, side, scale).sum((3, 5), dtype=np.uint16)
    image = ((block_sum + scale**2 // 2) // scale**2).astype(np.uint8)
    title = ARCHIVES["celeba-subset"]["title"]
    whole = tasks.Dataset.whole(title, image, label, num_classes=2)
    celeb = found["celeb"].astype(np.int64)
    return hold_out_by_owner(whole, "celeb", celeb, FEWEST_OF_CELEBRITY)


def load_cifar10_jpeg(data_dir: Path | None = None) -> tasks.Dataset:
    name = "cifar10-jpeg"
    found = read_archive(name, data_dir)
    train_x = _unpack(name, found, "train_", 32)
    test_x = _unpack(name, found, "test_", 32)
    train_y = found["train_y"].astype(np.int64)
    test_y = found["test_y"].astype(np.int64)
    return tasks.Dataset(ARCHIVES[name]["title"], train_x, train_y, test_x, test_y, num_classes=10)


def _unpack(name: str, found: dict[str, npt.NDArray[Any]], prefix: str, side: int) -> Bytes:
    """JPEG images of one size whose identical headers are stored once, (N, 3, side, side);
    cached when decoded.
    """
    offset_e = found[f"{prefix}offsets"]
    shape = (len(offset_e) - 1, 3, side, side)

    def unpack() -> Bytes:
        require("PIL", "sim")
        from PIL import Image

        start = found["header"].tobytes()
        scan = found[f"{prefix}scan"].tobytes()
        images = np.empty(shape, np.uint8)
        for i, (first, last) in enumerate(pairwise(offset_e.tolist())):
            with Image.open(io.BytesIO(start + scan[first:last]), formats=["JPEG"]) as image:
                images[i] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        return images

    # The checksum in the name: images of another archive are never taken for these.
    file = f"{prefix}{ARCHIVES[name]['sha256'][:16]}.npy"
    stem = Path(ARCHIVES[name]["file"]).stem
    return tasks.cached_images(tasks.cache_folder() / stem / file, shape, unpack)


def load_tinyshakespeare(data_dir: Path | None = None) -> tasks.Dataset:
    """Roles cut in time, 80 % for training; the column of owners is ``role``, the number of the
    role in the archive.
    """
    found = read_archive("tinyshakespeare", data_dir)
    tokens = tasks.encode_text(found["text"], TINY_ALPHABET)
    pieces: list[tuple[npt.NDArray[Any], ...]] = []
    for role, (first, last) in enumerate(pairwise(found["offsets"].tolist())):
        if last - first >= FEWEST_OF_ROLE:
            cut = first + int(TRAIN_SHARE * (last - first))
            train_x, train_y = windows(tokens[first:cut])
            test_x, test_y = windows(tokens[cut:last])
            roles = [np.full(len(y), role) for y in (train_y, test_y)]
            pieces.append((train_x, train_y, test_x, test_y, *roles))
    return joined_roles(ARCHIVES["tinyshakespeare"]["title"], pieces)


def joined_roles(title: str, pieces: Sequence[tuple[npt.NDArray[Any], ...]]) -> tasks.Dataset:
    """Text of several roles as one data set: of each train_x, train_y, test_x, test_y, and its
    number for every example of both.
    """
    train_x, train_y, test_x, test_y, *owners = map(np.concatenate, zip(*pieces, strict=True))
    return tasks.Dataset(
        title,
        train_x,
        train_y,
        test_x,
        test_y,
        num_classes=len(TINY_ALPHABET),
        columns={"role": owners[0]},
        test_columns={"role": owners[1]},
    )


def windows(token_k: Bytes) -> tuple[Bytes, IntArray]:
    """Windows of ``WINDOW`` tokens, ``STRIDE`` apart, and the token after each: uint8 (N, 80)
    and int64 (N,).
    """
    if len(token_k) <= WINDOW:
        return np.zeros((0, WINDOW), np.uint8), np.zeros(0, np.int64)
    piece = np.lib.stride_tricks.sliding_window_view(token_k, WINDOW + 1)[::STRIDE]
    return piece[:, :WINDOW].copy(), piece[:, WINDOW].astype(np.int64)


def load_mnist(data_dir: Path | None = None) -> tasks.Dataset:
    """MNIST with the column ``writer`` where a folder holds ``mnist_writers.npz``, else as the
    package reads it.
    """
    path = _found("mnist_writers.npz", tasks.data_folders("mnist", data_dir))
    if path is None:
        assert _MNIST.load is not None
        return _MNIST.load(data_dir)
    found = np.load(path, allow_pickle=False)
    arrays = {}
    for ours, theirs in (("train", "train"), ("test", "t10k")):
        arrays[f"{theirs}-images-idx3-ubyte"] = found[f"{ours}_x"]
        arrays[f"{theirs}-labels-idx1-ubyte"] = found[f"{ours}_y"]
    writer = found["train_writer"].astype(np.int64)
    return replace(tasks.idx_dataset("mnist", arrays, path), columns={"writer": writer})


_KNOWN = tasks.known_tasks()
_MNIST = _KNOWN["mnist"]
_UNIPEN = replace(
    _KNOWN["femnist"],
    name="unipen62",
    summary="28 x 28 images of digits and letters, 62 classes, by writer; unipen62_writers.npz",
    num_clients=278,
    sample_size=56,
    load=load_unipen62,
    all_owners=False,
)
_CELEBA_SUBSET = replace(
    _KNOWN["celeba"],
    name="celeba-subset",
    summary="42 x 42 faces of celebrities, smiling or not, by celebrity; celeba_smiling_84.npz",
    num_clients=278,
    sample_size=56,
    load=load_celeba_subset,
    make_model=partial(tasks.celeba_cnn, 2, 42),
    all_owners=False,
)
_CIFAR_JPEG = replace(
    _KNOWN["cifar10"],
    name="cifar10-jpeg",
    summary=(
        "CIFAR-10 recompressed as JPEG, 32 x 32 in colour, cropped and flipped; cifar10_jpeg.npz"
    ),
    needs=("torch", "pillow", "archive"),
    load=load_cifar10_jpeg,
)
for _spec in (
    replace(
        _MNIST,
        summary="28 x 28 images of digits; by writer where mnist_writers.npz is found",
        load=load_mnist,
    ),
    _UNIPEN,
    replace(
        _UNIPEN,
        name="unipen62-small",
        summary="the same with a CNN of 45,086 parameters, which one core can train",
        make_model=partial(tasks.two_layer_cnn, classes=62),
    ),
    _CIFAR_JPEG,
    replace(
        _CIFAR_JPEG,
        name="cifar10-jpeg-resnet8",
        summary="the same with ResNet-8, 78,042 parameters, which two cores can train",
        make_model=partial(tasks.resnet, 10, (16, 32, 64), blocks=1, groups=8),
    ),
    _CELEBA_SUBSET,
    replace(
        _CELEBA_SUBSET,
        name="celeba-subset-84",
        summary="the same with 84 x 84 pixels, as CelebA's task has",
        load=partial(load_celeba_subset, side=84),
        make_model=partial(tasks.celeba_cnn, 2, 84),
    ),
    replace(
        _KNOWN["shakespeare"],
        name="tinyshakespeare",
        summary=(
            "a part of Shakespeare, the next character after 80, by role; tinyshakespeare_roles.npz"
        ),
        num_clients=141,
        sample_size=14,
        load=load_tinyshakespeare,
        make_model=partial(tasks.next_token_lstm, len(TINY_ALPHABET)),
        all_owners=False,
    ),
):
    tasks.register(_spec)
