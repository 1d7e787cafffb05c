"""Tasks on data sets that are published nowhere, registered in ``deltafl.tasks``; their owner
brings the files.

Each data set is one NumPy archive, looked for as in ``deltafl.tasks.files``. What they hold, by the
names of the arrays (N examples; uint8 unless another type is given):

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
import io
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

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


class _Found(NamedTuple):
    """An archive that was found; the title says so if its content is not the known one."""

    path: Path
    sha256: str
    title: str

    def array(self, key: str, whole: str, *shape: int | None) -> npt.NDArray[Any]:
        """An array of the archive: ``"uint8"`` or ``"int"`` (any whole numbers) of this shape;
        None for any length.
        """
        array = tasks.read_arrays(self.path, (key,))[key]
        fits = array.dtype == np.uint8 if whole == "uint8" else array.dtype.kind in "iu"
        lengths = [
            length if wanted is None else wanted
            for length, wanted in zip(array.shape, shape, strict=False)
        ]
        if not fits or array.ndim != len(shape) or list(array.shape) != lengths:
            wanted = ", ".join("N" if length is None else str(length) for length in shape)
            raise DeltaflError(
                f"{self.path}: {key} is {array.dtype} {array.shape}, needs {whole} ({wanted})"
            )
        return array


def _find(name: str, data_dir: Path | None) -> _Found:
    file, title, known = ARCHIVES[name].values()
    folders = tasks.data_folders(name, data_dir)
    path = next((folder / file for folder in folders if (folder / file).is_file()), None)
    if path is None:
        cure = f"not in {', '.join(map(str, folders))}: give its folder as data_dir or DELTAFL_DATA"
        raise DeltaflError(f"{name} needs the file {file}, which is published nowhere and {cure}")
    with path.open("rb") as archive:
        digest = hashlib.file_digest(archive, "sha256").hexdigest()
    return _Found(
        path, digest, title if digest == known else f"{title} (other content than known: {path})"
    )


def load_unipen62(data_dir: Path | None = None) -> tasks.Dataset:
    """Handwriting by writer; the column of owners is ``writer``."""
    found = _find("unipen62", data_dir)
    image = found.array("x", "uint8", None, 28, 28)[:, np.newaxis]
    label = found.array("y", "uint8", len(image)).astype(np.int64)
    writer = found.array("writer", "int", len(image)).astype(np.int64)
    whole = tasks.Dataset.whole(found.title, image, label, num_classes=62)
    return tasks.hold_out_by_owner(whole, "writer", writer, FEWEST_OF_WRITER, MOST_OF_WRITER)


def load_celeba_subset(data_dir: Path | None = None, side: int = 42) -> tasks.Dataset:
    """Faces by celebrity, at half their resolution or with 84 x 84 pixels; the column of owners
    is ``celeb``.
    """
    found = _find("celeba-subset", data_dir)
    label = found.array("y", "uint8", None).astype(np.int64)
    celeb = found.array("celeb", "int", len(label)).astype(np.int64)
    full = _unpack(found, "", len(label), 84)
    scale = 84 // side
    block_sum = full.reshape(len(full), 3, side, scale, side, scale).sum((3, 5), dtype=np.uint16)
    image = ((block_sum + scale**2 // 2) // scale**2).astype(np.uint8)
    whole = tasks.Dataset.whole(found.title, image, label, num_classes=2)
    return tasks.hold_out_by_owner(whole, "celeb", celeb, FEWEST_OF_CELEBRITY)


def load_cifar10_jpeg(data_dir: Path | None = None) -> tasks.Dataset:
    found = _find("cifar10-jpeg", data_dir)
    train_y, test_y = (
        found.array(key, "uint8", None).astype(np.int64) for key in ("train_y", "test_y")
    )
    train_x = _unpack(found, "train_", len(train_y), 32)
    test_x = _unpack(found, "test_", len(test_y), 32)
    return tasks.Dataset(found.title, train_x, train_y, test_x, test_y, num_classes=10)


def _unpack(found: _Found, prefix: str, number: int, side: int) -> Bytes:
    """JPEG images of one size whose identical headers are stored once, (N, 3, side, side);
    cached when decoded.
    """
    shape = (number, 3, side, side)
    cache = tasks.cache_folder() / found.path.stem

    def unpack() -> Bytes:
        require("PIL", "sim")
        from PIL import Image

        start, scan = (
            found.array(key, "uint8", None).tobytes() for key in ("header", f"{prefix}scan")
        )
        offset_e = found.array(f"{prefix}offsets", "int", number + 1)
        images = np.empty(shape, np.uint8)
        for i, (first, last) in enumerate(pairwise(offset_e.tolist())):
            try:
                with Image.open(io.BytesIO(start + scan[first:last]), formats=["JPEG"]) as image:
                    images[i] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                raise DeltaflError(f"{found.path}: image {i} cannot be decoded: {error}") from error
        return images

    # The checksum in the name: images of another archive are never taken for these.
    return tasks.cached_images(cache / f"{prefix}{found.sha256[:16]}.npy", shape, unpack)


def load_tinyshakespeare(data_dir: Path | None = None) -> tasks.Dataset:
    """Roles cut in time, 80 % for training; the column of owners is ``role``, the number of the
    role in the archive.
    """
    found = _find("tinyshakespeare", data_dir)
    tokens = tasks.encode_text(found.array("text", "uint8", None), TINY_ALPHABET)
    pieces: list[list[Any]] = [[], [], [], [], [], []]
    for role, (first, last) in enumerate(pairwise(found.array("offsets", "int", None).tolist())):
        if last - first >= FEWEST_OF_ROLE:
            cut = first + int(TRAIN_SHARE * (last - first))
            train = windows(tokens[first:cut])
            test = windows(tokens[cut:last])
            roles = [np.full(len(y), role) for _, y in (train, test)]
            for column, piece in zip(pieces, (*train, *test, *roles), strict=True):
                column.append(piece)
    if not pieces[0]:
        raise DeltaflError(f"{found.path}: no role has {FEWEST_OF_ROLE} characters or more")
    train_x, train_y, test_x, test_y, role_e, test_role_e = map(np.concatenate, pieces)
    owners = {"role": role_e}
    test_owners = {"role": test_role_e}
    parts = (train_x, train_y, test_x, test_y, len(TINY_ALPHABET))
    return tasks.Dataset(found.title, *parts, columns=owners, test_columns=test_owners)


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
    paths = (folder / "mnist_writers.npz" for folder in tasks.data_folders("mnist", data_dir))
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        assert _MNIST.load is not None
        return _MNIST.load(data_dir)
    found = _Found(path, "", "MNIST by writer")
    arrays = {}
    for ours, theirs in (("train", "train"), ("test", "t10k")):
        arrays[f"{theirs}-images-idx3-ubyte"] = found.array(f"{ours}_x", "uint8", None, None, None)
        arrays[f"{theirs}-labels-idx1-ubyte"] = found.array(f"{ours}_y", "uint8", None)
    writer = found.array("train_writer", "int", len(arrays["train-labels-idx1-ubyte"])).astype(
        np.int64
    )
    return tasks.idx_dataset("mnist", arrays, path, {"writer": writer})


_KNOWN = tasks.known_tasks()
_MNIST = _KNOWN["mnist"]
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
    replace(
        _KNOWN["femnist"],
        name="unipen62",
        summary="28 x 28 images of digits and letters, 62 classes, by writer; unipen62_writers.npz",
        num_clients=278,
        sample_size=56,
        load=load_unipen62,
        all_owners=False,
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
