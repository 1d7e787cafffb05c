"""Packed JPEG: many images of one size whose identical headers are stored once; decoded once, and kept.

An image is the header followed by its own piece of ``scan``, which holds the pieces end to end; ``offset_e`` (N + 1,)
says where each starts. Decoding takes Pillow, and some 10 s for 60,000 small images, so the result is kept in the
user's cache.
"""

import io
import logging
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError, MissingExtraError

Bytes = npt.NDArray[np.uint8]

_log = logging.getLogger(__name__)


def decode(path: Path, header: Bytes, scan: Bytes, offset_e: npt.NDArray[Any], shape: tuple[int, ...]) -> Bytes:
    """Decode packed images.

    Args:
        path: Where they come from, for messages.
        header: The bytes with which every file begins.
        scan: The rest of each file, end to end.
        offset_e: (N + 1,) whole numbers: where each piece of ``scan`` starts, and its length.
        shape: (N, 3, height, width), what must come out.

    Returns:
        uint8 images of that shape, red, green, blue.

    Raises:
        DeltaflError: If the offsets do not fit, or an image is broken or of another size.
        MissingExtraError: Without Pillow.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pillow", "sim") from error
    _check_offsets(path, offset_e, len(scan), shape[0])
    images = np.empty(shape, np.uint8)
    start, content = header.tobytes(), scan.tobytes()
    for number, (first, last) in enumerate(pairwise(offset_e.tolist())):
        try:
            with Image.open(io.BytesIO(start + content[first:last]), formats=["JPEG"]) as image:
                if image.size != (shape[3], shape[2]):
                    raise OSError(f"it is {image.size[0]} x {image.size[1]} pixels, needs {shape[3]} x {shape[2]}")
                images[number] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise DeltaflError(f"{path}: image {number} cannot be decoded: {error}") from error
    return images


def kept(file: Path, shape: tuple[int, ...], make: Callable[[], Bytes]) -> Bytes:
    """The images of a file in the cache; they are made and written if it is missing, broken or of another shape.

    The file appears whole or not at all, so several processes may do this at once. Where it cannot be written, the log
    says so and the images are made again the next time.
    """
    try:
        images: npt.NDArray[Any] = np.load(file, allow_pickle=False)
        if images.shape == shape and images.dtype == np.uint8:
            return images
    except (OSError, ValueError, EOFError):
        pass  # made anew below
    images = make()
    try:
        _write(file, images)
    except OSError as error:
        _log.warning("decoded images cannot be kept in %s: %s", file, error.strerror)
    return images


def _write(file: Path, images: Bytes) -> None:
    """Write under another name first, then rename, which is atomic."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as part:
        try:
            np.save(part, images)
            part.close()
            Path(part.name).replace(file)
        except BaseException:
            Path(part.name).unlink(missing_ok=True)
            raise


def _check_offsets(path: Path, offset_e: npt.NDArray[Any], num_bytes: int, num_images: int) -> None:
    if offset_e.dtype.kind not in "iu" or offset_e.shape != (num_images + 1,):
        raise DeltaflError(
            f"{path}: offsets are {offset_e.dtype} {offset_e.shape}, needs {num_images + 1} whole numbers "
            f"for {num_images} labels"
        )
    if offset_e[0] != 0 or offset_e[-1] != num_bytes or (offset_e[1:] < offset_e[:-1]).any():
        raise DeltaflError(f"{path}: offsets must rise from 0 to {num_bytes}, the length of the packed images")
