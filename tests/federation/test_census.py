"""What a server reads as the answer to a census; ``tests/flower/test_census.py`` plays rounds with one."""

from typing import Any

import numpy as np
import pytest

from deltafl import DeltaflError
from deltafl.federation.service import read_answer


@pytest.mark.parametrize(
    "lie",
    [[], [0.5] * 3, [0.5] * 5, [0.5, 0.5, 0.5, np.nan], [np.inf] * 4, [1e130, 0.0, 0.0, 0.0], 1.0, ["a"] * 4, {}],
)
def test_what_is_no_answer_is_refused_in_one_sentence(lie: Any) -> None:
    with pytest.raises(DeltaflError, match=r"the answer is not 4 finite numbers of at most 1e\+100"):
        read_answer(lie, 4)


def test_what_is_read() -> None:
    assert read_answer([1, 0, 0, -1], 4) == (1.0, 0.0, 0.0, -1.0)
    with pytest.raises(DeltaflError, match="add delta_mod to the ClientApp's mods"):
        read_answer(None, 4)
    with pytest.raises(DeltaflError, match="no reply in time"):
        read_answer("no reply in time", 4)
