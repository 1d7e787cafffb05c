"""Small pictures for the tests of data sets."""

import io

import numpy as np
import pytest


def png(level: int, side: int = 28, kind: str = "PNG") -> bytes:
    """A square picture of one level of grey, in a format of Pillow."""
    image_module = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image_module.fromarray(np.full((side, side), level, np.uint8)).save(file, kind)
    return file.getvalue()
