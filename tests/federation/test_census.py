"""What a server reads as the answer to a census; ``tests/flower/test_census.py`` plays rounds
with one.
"""

from typing import Any

import numpy as np
import pytest

from deltafl import DeltaflError
from deltafl.federation.clients import ClientInfo
from deltafl.federation.replies import ClientReply, read_answer
from deltafl.types import FloatArray

from .tools import federation, play_once

NO_NUMBERS = "the answer is not 4 finite numbers"


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        *(([0.5] * count, NO_NUMBERS) for count in (0, 3, 5)),
        *(([0.5, 0.5, 0.5, last], NO_NUMBERS) for last in (np.nan, np.inf, 1e130, "a")),
        (1.0, NO_NUMBERS),
        ({}, NO_NUMBERS),
        (None, NO_NUMBERS),
    ],
)
def test_what_is_no_answer_is_refused(reply: Any, reason: str) -> None:
    assert read_answer({"census": [1, 0, 0, -1]}, 4) == (1.0, 0.0, 0.0, -1.0)
    with pytest.raises(DeltaflError, match=reason):
        read_answer({"census": reply}, 4)


def test_a_newcomer_in_a_small_federation_moves_no_model_away() -> None:
    """8 clients have 7 components; the ninth adds one of which nothing was learnt."""
    target_md = np.random.default_rng(3).normal(size=(9, 30)).astype(np.float32)
    fed = federation("census", {"x": np.zeros(30, np.float32)}, n=3, seed=1)

    def play(m: int, rounds: int) -> None:
        fed.admit({f"client:{i}": ClientInfo(10 + i) for i in range(m)})
        census = fed.plan.census
        assert census is not None
        updates = {key: target_md[fed.keys.index(key)] - fed.params_d for key in fed.unanswered()}
        fed.answer(
            {key: tuple(census.answer(update_d).tolist()) for key, update_d in updates.items()}
        )
        for _ in range(rounds):
            play_once(
                fed,
                lambda client: ClientReply(
                    {"x": 0.75 * fed.arrays()["x"] + 0.25 * target_md[client]}
                ),
            )

    play(8, rounds=6)
    play(9, rounds=4)
    assert np.abs(fed.params_d).max() < 10


@pytest.mark.parametrize(("first", "members", "most"), [(0, 12, 0.35), (6, 12, 0.35), (9, 9, 0.5)])
def test_late_answers_and_those_of_newcomers_predict_updates(
    first: int, members: int, most: float
) -> None:
    """As those before the first round do, whether nobody had answered, some had, or others have
    joined since.
    """
    rng = np.random.default_rng(1)
    update_md = (rng.normal(size=(12, 40)) + 2 * rng.normal(size=40)).astype(np.float32)
    fed = federation("census", {"x": np.zeros(40, np.float32)}, n=4, seed=1)

    def predicted() -> FloatArray:
        value = fed.plan.rule.control.value(fed.current.control, np.arange(len(fed.keys)))
        control_md = np.broadcast_to(value.control_nd, (len(fed.keys), 40))
        assert np.allclose(value.total_d, fed.plan.population.weight_m @ control_md)
        return np.asarray(np.linalg.norm(control_md - update_md[: len(fed.keys)], axis=1))

    def take(count: int) -> None:
        census = fed.plan.census
        assert census is not None
        answers = {
            key: census.answer(update_md[fed.keys.index(key)]) for key in fed.unanswered()[:count]
        }
        fed.answer({key: tuple(answer_k.tolist()) for key, answer_k in answers.items()})

    fed.admit({f"client:{i}": ClientInfo(10) for i in range(members)})
    take(first)
    for _ in range(3):
        play_once(fed, lambda client: ClientReply({"x": fed.arrays()["x"] + update_md[client]}))
    late = np.asarray(fed.current.responded_m) == 0
    fed.admit({f"client:{i}": ClientInfo(10) for i in range(12)})
    take(12)
    late_m = np.append(late, np.ones(12 - members, dtype=bool)) & (np.arange(12) >= first)
    assert late_m.any()
    assert (predicted() / np.linalg.norm(update_md, axis=1))[late_m].max() < most
    for _ in range(6):
        play_once(fed, lambda client: ClientReply({"x": fed.arrays()["x"] + update_md[client]}))
        predicted()
