"""The data sets that are files: where they are published, what they must contain, where they are looked for.

A data set of ``SOURCES`` is four IDX files, gzipped or not. The table holds the SHA-256 of the *uncompressed*
content, so that one number fits the published files, a distribution's recompressed ones and files that somebody
has unpacked. A data set of ``ARCHIVES`` is one NumPy archive that nobody publishes: its owner brings it. A data set of
``FORMS`` is one that people have in several forms, as other projects' scripts leave them.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import DeltaflError, unknown_name

TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"

#: MNIST with the writer of each training digit in one file; read instead of MNIST's four files where it is
# found.
WRITERS_FILE = "mnist_writers.npz"

#: Most bytes in a file of unknown size: far more than any of these data sets has, and little for a disk.
LARGEST = 1 << 30

#: Bytes of the IDX files of MNIST and Fashion-MNIST: a header of 4 bytes and 4 an axis, then one byte a pixel or label.
IDX_SIZES = {
    TRAIN_IMAGES: 16 + 60_000 * 28 * 28,
    TRAIN_LABELS: 8 + 60_000,
    TEST_IMAGES: 16 + 10_000 * 28 * 28,
    TEST_LABELS: 8 + 10_000,
}


@dataclass(frozen=True)
class Source:
    """Where a data set comes from.

    Attributes:
        url: Address of the folder with the gzipped files; ends with a slash.
        sha256: For each file, named without ``.gz``, the SHA-256 of its uncompressed content in hexadecimal.
        system_folders: Where operating systems install it.
        sizes: Bytes of the uncompressed content of each file whose size is known; ``LARGEST`` limits the others.
    """

    url: str
    sha256: Mapping[str, str]
    system_folders: tuple[Path, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)

    def limit(self, file: str) -> int:
        """The most bytes that the content of a file can have."""
        return self.sizes.get(file, LARGEST)


SOURCES: dict[str, Source] = {
    "mnist": Source(
        url="https://ossci-datasets.s3.amazonaws.com/mnist/",
        sizes=IDX_SIZES,
        sha256={
            TRAIN_IMAGES: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            TRAIN_LABELS: "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            TEST_IMAGES: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            TEST_LABELS: "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
    ),
    "fashion-mnist": Source(
        url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        sizes=IDX_SIZES,
        sha256={
            TRAIN_IMAGES: "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            TRAIN_LABELS: "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            TEST_IMAGES: "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            TEST_LABELS: "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
        system_folders=(Path("/usr/share/datasets/fashion-mnist"),),
    ),
}


@dataclass(frozen=True)
class Archive:
    """A data set in one NumPy archive; ``images.py`` says what must be inside.

    Attributes:
        file: Its name.
        sha256: SHA-256 of the archive that the experiments of this project use, in hexadecimal.
        title: What it is; reports print it.
    """

    file: str
    sha256: str
    title: str


ARCHIVES: dict[str, Archive] = {
    "tinyshakespeare": Archive(
        file="tinyshakespeare_roles.npz",
        sha256="97caf919c2a2333011dffc7a41531a7416869333aafbcee81d44d936f6db6c3a",
        title="tiny Shakespeare by role",
    ),
    "unipen62": Archive(
        file="unipen62_writers.npz",
        sha256="b968e5e2c291aa0230d3ea7fd8214f6d65d41e4640bb0dbc3a3287baf2b99818",
        title="UNIPEN-62 by writer",
    ),
    "cifar10-jpeg": Archive(
        file="cifar10_jpeg.npz",
        sha256="5807fcc6606286c85a04b70371a321db6d71a725399b9c318e1c4eadf6f1d09b",
        title="CIFAR-10 recompressed as JPEG",
    ),
    "celeba-subset": Archive(
        file="celeba_smiling_84.npz",
        sha256="57ccb92a5a88b2337bfb147e69585fa88432554d1df312070e7c57b89cc330c6",
        title="subset of CelebA by celebrity",
    ),
}


#: Data sets that people have in several forms, none of which is fetched: what is looked for, in words. ``cifar.py``,
#: ``femnist.py``, ``leaf.py`` and ``text.py`` read them.
FORMS: dict[str, str] = {
    "cifar10": "cifar-10-batches-py/, cifar-10-batches-bin/, their .tar.gz, or cifar10.npz",
    "femnist": "LEAF's data/train/*.json and data/test/*.json, fed_emnist_train.h5 with fed_emnist_test.h5, "
    "or *.parquet with the columns image, writer_id and character",
    "celeba": "LEAF's data/train/*.json and data/test/*.json, with the pictures in data/raw/img_align_celeba/",
    "shakespeare": "LEAF's data/train/*.json and data/test/*.json",
}


def not_found(name: str, folders: Sequence[Path]) -> DeltaflError:
    """The error for a data set of ``FORMS`` that is in none of the folders."""
    looked, cure = ", ".join(map(str, folders)), "give the folder that holds it as data_dir or DELTAFL_DATA"
    return DeltaflError(f"{name} needs {FORMS[name]}; none of it is in {looked}: {cure}")


def get_source(name: str, sources: Mapping[str, Source] = SOURCES) -> Source:
    """The source of a data set; a DeltaflError if there is none of this name."""
    if name in ARCHIVES:
        raise DeltaflError(
            f"{name} is one file, {ARCHIVES[name].file}, that is published nowhere: "
            "put it into a folder and give that as data_dir or DELTAFL_DATA"
        )
    if name in FORMS:
        raise DeltaflError(f"{name} is not fetched: give a folder with {FORMS[name]} as data_dir or DELTAFL_DATA")
    if name not in sources:
        raise unknown_name("data set with files", name, sources)
    return sources[name]


def cache_folder() -> Path:
    """The user's cache, ``$XDG_CACHE_HOME/deltafl`` or ``~/.cache/deltafl``: where ``deltafl data fetch`` writes."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "deltafl"


def search_folders(name: str, data_dir: Path | None, sources: Mapping[str, Source] = SOURCES) -> list[Path]:
    """The folders where a data set is looked for, best first.

    ``data_dir/NAME`` and ``data_dir``, the same of the environment variable ``DELTAFL_DATA``, folders of the
    operating system, the user's cache.

    Raises:
        DeltaflError: If ``data_dir`` or ``DELTAFL_DATA`` is given and is no folder.
    """
    system_folders = get_source(name, sources).system_folders
    return [*_given_folders(name, data_dir), *system_folders, cache_folder() / name]


def find_archive(name: str, data_dir: Path | None) -> Path:
    """The archive of a data set: in ``data_dir/NAME`` or ``data_dir``, the same of ``DELTAFL_DATA``, or the cache.

    Raises:
        DeltaflError: If it is nowhere, or ``data_dir`` or ``DELTAFL_DATA`` is given and is no folder.
    """
    path = locate_archive(name, data_dir)
    if path is None:
        raise DeltaflError(
            f"{name} needs the file {ARCHIVES[name].file}, which is not in "
            f"{', '.join(map(str, folders_of(name, data_dir)))}: "
            "give the folder that holds it as data_dir or DELTAFL_DATA"
        )
    return path


def locate_archive(name: str, data_dir: Path | None) -> Path | None:
    """As ``find_archive``, but None if it is nowhere."""
    paths = (folder / ARCHIVES[name].file for folder in folders_of(name, data_dir))
    return next((path for path in paths if path.is_file()), None)


def folders_of(name: str, data_dir: Path | None) -> list[Path]:
    """Where a data set that is not fetched is looked for: ``data_dir/NAME``, ``data_dir``, ``DELTAFL_DATA``, the cache.

    Raises:
        DeltaflError: If ``data_dir`` or ``DELTAFL_DATA`` is given and is no folder.
    """
    return [*_given_folders(name, data_dir), cache_folder() / name]


def _given_folders(name: str, data_dir: Path | None) -> list[Path]:
    """``data_dir/NAME`` and ``data_dir``, then the same of ``DELTAFL_DATA``; only what is given."""
    folders: list[Path] = []
    environment = os.environ.get("DELTAFL_DATA")
    given = {"data_dir": data_dir, "DELTAFL_DATA": Path(environment) if environment else None}
    for label, path in given.items():
        if path is None:
            continue
        folder = path.expanduser()
        if not folder.is_dir():
            raise DeltaflError(f"{label} is {folder}, which is not a folder: give one with data sets, or leave it out")
        folders += [folder / name, folder]
    return folders


def find_file(folder: Path, name: str) -> Path | None:
    """The file, or its gzipped form, in a folder; None if there is neither."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def sha256_of(*parts: bytes | memoryview) -> str:
    """The SHA-256 of some bytes, one part after the other, in hexadecimal."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
