"""Arrays that share their memory with older ones, against plain copies."""

import copy
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafl.scale.persistent_array import Buffer, PersistentArray
from deltafl.scale.tree import SumTree
from deltafl.types import FloatArray

SIZE = 40
#: (which version to start from, where to write, which version to read afterwards)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 99), st.sets(st.integers(0, SIZE - 1), max_size=12), st.integers(0, 99)
    ),
    max_size=30,
)


@given(STEPS, st.sampled_from([PersistentArray, SumTree]))
def test_all_versions_read_as_copies_would(
    steps: list[tuple[int, set[int], int]], kind: type[PersistentArray]
) -> None:
    """Branches and old versions, in any order; every version is read again at the end."""
    plain: list[FloatArray] = [np.arange(float(SIZE))]
    shared = [kind(plain[0].copy())]
    for step, (start, places, read) in enumerate(steps):
        index_k = np.array(sorted(places), dtype=np.int64)
        value_k = 1000.0 * (step + 1) + index_k
        old = start % len(plain)
        plain.append(plain[old].copy())
        plain[-1][index_k] = value_k
        shared.append(shared[old].replaced(index_k, value_k))
        assert shared[read % len(plain)].tolist() == plain[read % len(plain)].tolist()
    for array, version in zip(plain, shared, strict=True):
        assert version.tolist() == array.tolist()
        if isinstance(version, SumTree):  # a function of the scores, bit for bit
            assert np.array_equal(version.current().inner, SumTree(array.copy()).current().inner)


def test_it_takes_part_in_arithmetic_as_the_array_it_stands_for() -> None:
    count_m = PersistentArray(np.array([3, 1, 2], dtype=np.int16))
    assert count_m.dtype == np.int16
    assert [*count_m.shape, len(count_m), count_m.sum(), np.min(count_m)] == [3, 3, 6, 1]
    assert (count_m - count_m.plus_one(np.array([1]))).tolist() == [0, -1, 0]
    assert np.flatnonzero(count_m == 1).tolist() == [1]
    assert np.concatenate([count_m, [9]]).tolist() == [3, 1, 2, 9]
    assert [count_m[1], count_m[np.array([2, 0])].tolist()] == [1, [2, 3]]
    assert repr(count_m) == "PersistentArray(array([3, 1, 2], dtype=int16))"


def test_nobody_can_change_it() -> None:
    before = PersistentArray(np.zeros(4))
    for part in (np.asarray(before), before[:], before[1:3], before[np.array([0])]):
        part[:] = 5
    assert before.tolist() == [0, 0, 0, 0]
    with pytest.raises(TypeError, match="use replaced"):
        np.add(before, 1, out=before)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="only be read by copying"):
        np.asarray(before, copy=False)


def test_copies_share_nothing() -> None:
    first = SumTree(np.arange(1.0, 100))
    second = first.replaced(np.array([3]), [50.0])
    for twin in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):  # noqa: S301
        assert isinstance(twin, SumTree)
        assert twin.tolist() == first.tolist() == list(range(1, 100))
        assert twin.replaced(np.array([0]), [7.0])[0] == 7
    assert second[3] == 50


def test_counts_become_wider_before_they_overflow() -> None:
    count_m = PersistentArray(np.array([32766, 5, 0], dtype=np.int16))
    at_most = count_m.plus_one(np.array([0, 1]))
    beyond = at_most.plus_one(np.array([0, 2]))
    assert [at_most.dtype, beyond.dtype] == [np.int16, np.int32]
    assert [at_most.tolist(), beyond.tolist()] == [[32767, 6, 0], [32768, 6, 1]]


def test_a_version_kept_for_ever_costs_one_array_and_not_its_whole_future() -> None:
    """20,000 changes of 10,000 numbers: the differences from the first version must not pile up
    beside it.
    """
    rng = np.random.default_rng(0)
    first = newest = PersistentArray(np.zeros(10_000, dtype=np.int64))
    tracemalloc.start()
    for _ in range(200):
        newest = newest.plus_one(rng.choice(10_000, size=100, replace=False))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 4 * 80_000
    assert (first.sum(), newest.sum()) == (0, 20_000)


def test_nothing_is_copied_while_older_versions_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long a run is: at ten million clients one copy would be 80 MB."""
    copies = []
    copy_of = Buffer.copy

    def counted(buffer: Buffer) -> Buffer:
        copies.append(buffer)
        return copy_of(buffer)

    monkeypatch.setattr(Buffer, "copy", counted)
    rng = np.random.default_rng(0)
    newest = PersistentArray(np.zeros(1000, dtype=np.int64))
    for _ in range(100):
        newest = newest.plus_one(rng.choice(1000, size=100, replace=False))
    assert not copies
    held = newest
    for _ in range(12):
        newest = newest.plus_one(rng.choice(1000, size=100, replace=False))
    assert copies
    assert (held.sum(), newest.sum()) == (10_000, 11_200)
