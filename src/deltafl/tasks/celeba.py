"""CelebA in LEAF's form: smiling or not, by celebrity, 84 x 84 in colour.

LEAF's JSON (see ``leaf.py``) names pictures, which lie in ``raw/img_align_celeba/`` beside ``train`` and ``test``. As
LEAF does, each is reduced to 84 x 84; that takes minutes for all of CelebA, so the result is kept in the user's cache.

Source: Caldas et al., arXiv:1812.01097; Liu et al., "Deep learning face attributes in the wild", ICCV 2015.
"""

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError, require
from .base import Dataset
from .leaf import PARTS, Owned, Share, dataset_by_user, find_leaf, labels_of, read_shares
from .packed import kept
from .sources import cache_folder, folders_of, not_found

SIDE = 84


def load_celeba(data_dir: Path | None = None) -> Dataset:
    """Load CelebA from LEAF's folder; the column of owners is ``celebrity``.

    Raises:
        DeltaflError: If it is not found, or a file or picture is broken; the sentence names file, user and row.
        MissingExtraError: Without Pillow.
    """
    folders = folders_of("celeba", data_dir)
    root = find_leaf("celeba", folders)
    if root is None:
        raise not_found("celeba", folders)
    pictures = root / "raw" / "img_align_celeba"
    if not pictures.is_dir():
        raise DeltaflError(f"celeba needs the folder {pictures} with the pictures that the JSON files name")
    require("PIL", "sim")
    train, test = (_part(root, part, pictures) for part in PARTS)
    return dataset_by_user("CelebA (LEAF's JSON)", "celebrity", train, test, classes=2)


def _part(root: Path, part: str, pictures: Path) -> Owned:
    shares = list(read_shares(root, part))
    label = [labels_of(share, 2) for share in shares]
    owner = [share.user for share in shares for _ in share.y]
    digest = hashlib.sha256()
    for share in shares:
        for row in range(len(share.x)):
            found = _picture(share, row, pictures).stat()
            digest.update(f"{share.x[row]} {found.st_size} {found.st_mtime_ns}\n".encode())

    def decode_all() -> npt.NDArray[np.uint8]:
        image = np.empty((len(owner), 3, SIDE, SIDE), np.uint8)
        rows = ((share, row) for share in shares for row in range(len(share.x)))
        for number, (share, row) in enumerate(rows):
            image[number] = _decoded(share, row, pictures)
        return image

    file = cache_folder() / "celeba" / f"{part}_{digest.hexdigest()[:16]}.npy"
    image = kept(file, (len(owner), 3, SIDE, SIDE), decode_all)
    return Owned(image, np.concatenate([np.zeros(0, np.int64), *label]), owner)


def _picture(share: Share, row: int, pictures: Path) -> Path:
    """The file that a row names; a name with folders in it is refused."""
    name = share.x[row]
    if not isinstance(name, str) or Path(name).name != name:
        raise share.error(row, f"x is {name!r}; it must be the name of a picture")
    if not (pictures / name).is_file():
        raise share.error(row, f"there is no picture {pictures / name}")
    return pictures / name


def _decoded(share: Share, row: int, pictures: Path) -> npt.NDArray[np.uint8]:
    from PIL import Image

    path = _picture(share, row, pictures)
    try:
        with Image.open(path, formats=["JPEG", "PNG"]) as opened:  # for another format Pillow runs Ghostscript
            image = opened.resize((SIDE, SIDE)).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise share.error(row, f"the picture {share.x[row]} cannot be decoded: {error}") from error
    return np.asarray(image).transpose(2, 0, 1)
