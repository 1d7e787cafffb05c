import numpy as np
import pytest

from deltafl import DeltaflError, stream
from deltafl.streams import PURPOSES

#: First 64 bits of some streams. If these change, no earlier run can be repeated.
PINNED = {
    (0, "draw", 0, 0): 8358101727642175730,
    (0, "draw", 1, 0): 18076242073582295704,
    (0, "batches", 5, 17): 14011944931128041632,
    (12345678901234567890, "noise", 999, 3): 5997614496860632672,
    (7, "dropout", 0, 0): 18267789074292963221,
}


def first(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    return int(stream(seed, purpose, round, client).bit_generator.random_raw())


@pytest.mark.parametrize(("key", "value"), PINNED.items())
def test_pinned(key: tuple[int, str, int, int], value: int) -> None:
    assert first(*key) == value


def test_purposes_are_pinned() -> None:
    """Numbers identify streams: new ones may be added, none may be reused."""
    pinned = [
        "draw",
        "batches",
        "noise",
        "model",
        "partition",
        "data",
        "audit",
        "bootstrap",
        "dropout",
        "augment",
    ]
    assert [PURPOSES.get(name) for name in pinned] == list(range(1, 11))
    assert len(set(PURPOSES.values())) == len(PURPOSES)


def test_all_streams_are_distinct() -> None:
    keys = [(s, p, r, c) for s in range(3) for p in PURPOSES for r in range(4) for c in range(4)]
    assert len({first(*key) for key in keys}) == len(keys)


def test_global_generator_is_left_alone() -> None:
    np.random.seed(0)  # noqa: NPY002 - the global generator, to prove that nobody touches it
    expected = np.random.random()  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002
    stream(0, "draw").random(10)
    assert np.random.random() == expected  # noqa: NPY002


def test_neighbouring_streams_are_uncorrelated() -> None:
    """Correlations of 60 neighbouring streams: all within what independence allows."""
    rows = np.array([stream(0, "draw", round=r).standard_normal(2000) for r in range(60)])
    off_diagonal = np.corrcoef(rows)[np.triu_indices(60, 1)]
    assert np.abs(off_diagonal).max() < 4.5 / np.sqrt(2000)


@pytest.mark.parametrize(
    ("seed", "purpose", "round", "client", "part"),
    [
        (0, "drwa", 0, 0, "did you mean 'draw'"),
        (-1, "draw", 0, 0, "got -1, 0, 0"),
        (0, "draw", 0, -3, "got 0, 0, -3"),
    ],
)
def test_impossible_streams(seed: int, purpose: str, round: int, client: int, part: str) -> None:
    with pytest.raises(DeltaflError, match=part):
        stream(seed, purpose, round, client)
