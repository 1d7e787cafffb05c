"""Test sets that are cut from the examples of each owner."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltafl.errors import DeltaflError
from deltafl.tasks import Dataset
from reproduction.data import hold_out_by_owner


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=120),
    st.integers(1, 8),
    st.none() | st.integers(1, 30),
)
def test_tests_held_out_by_owner_against_a_slow_reference(
    owners: list[int], fewest: int, most: int | None
) -> None:
    seen = dict.fromkeys(owners, 0)
    expected: dict[bool, list[int]] = {False: [], True: []}
    for row, owner in enumerate(owners):
        if owners.count(owner) >= fewest and (most is None or seen[owner] < most):
            expected[seen[owner] % 10 == 4].append(row)
        seen[owner] += 1
    row_e = np.arange(len(owners))
    whole = Dataset("made up", row_e, row_e, row_e[:0], row_e[:0], 0)
    try:
        cut = hold_out_by_owner(whole, "owner", np.array(owners), fewest, most)
    except DeltaflError:
        assert expected[True] == []
        return
    assert [cut.train_x.tolist(), cut.test_x.tolist()] == [expected[False], expected[True]]
    assert cut.test_columns["owner"].tolist() == [owners[row] for row in expected[True]]
