"""What a server reads as the answer to a census; ``tests/flower/test_census.py`` plays rounds with one."""

from typing import Any

import numpy as np
import pytest

from deltafl import DeltaflError
from deltafl.federation.clients import ClientInfo
from deltafl.federation.replies import ClientReply
from deltafl.federation.service import read_answer

from .tools import federation, play_once


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


def test_a_newcomer_in_a_small_federation_moves_no_model_away() -> None:
    """8 clients have 7 components; the ninth adds one of which nothing was learnt."""
    target_md = np.random.default_rng(3).normal(size=(9, 30)).astype(np.float32)
    fed = federation("census", {"x": np.zeros(30, np.float32)}, n=3, seed=1)

    def play(m: int, rounds: int) -> None:
        fed.admit({f"client:{i}": ClientInfo(10 + i) for i in range(m)})
        census = fed.plan.census
        assert census is not None
        updates = {key: target_md[fed.keys.index(key)] - fed.params_d for key in fed.unanswered()}
        fed.answer({key: tuple(census.answer(update_d).tolist()) for key, update_d in updates.items()})
        for _ in range(rounds):
            play_once(fed, lambda client: ClientReply({"x": 0.75 * fed.arrays()["x"] + 0.25 * target_md[client]}))

    play(8, rounds=6)
    play(9, rounds=4)
    assert np.abs(fed.params_d).max() < 10
