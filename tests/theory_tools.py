"""What the tests of docs/theory.md and docs/theory-table-1.md share."""

from pathlib import Path

import numpy as np

from deltafl.types import FloatArray

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "theory.md").read_text()
TABLE = (DOCS / "theory-table-1.md").read_text()


def states(*parts: str, text: str = TEXT) -> None:
    """The page says each of these; a number may follow a line break."""
    flat = " ".join(text.split())
    for part in parts:
        assert part in flat, f"the page does not say {part!r}"


def variance(gradient_md: FloatArray, p_m: FloatArray, n: int = 1) -> float:
    """One-round variance of the mean's Hansen-Hurwitz estimate, equal weights."""
    m = len(gradient_md)
    square_m = (gradient_md**2).sum(axis=1)
    return float((np.sum(square_m / p_m) / m**2 - np.sum(gradient_md.mean(axis=0) ** 2)) / n)
