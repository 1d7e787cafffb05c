"""What a host gives, and what its clients said: mistakes are one sentence, bad replies cost nobody else anything."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deltafl import (
    DeltaflError,
    Population,
    RemoteReply,
    Reports,
    RoundInfo,
    close_round,
    init_round,
    make_plan,
    open_round,
)

RAGGED: Any = [[1], [1, 2]]
POPULATION = Population.from_sizes([1, 2, 3])


def closed(updates: Any, label: str = "uniform", /, **columns: Any) -> RoundInfo:
    """One round in which all three clients are asked."""
    plan = make_plan(label, POPULATION, 3)
    state = init_round(plan, np.zeros(2))
    cohort = open_round(plan, state)
    return close_round(plan, state, cohort, updates, Reports.make(3, **columns) if columns else None)[1]


@pytest.mark.parametrize(
    ("column", "said", "reason"),
    [
        ("loss", "much", "loss is nan"),
        ("loss", 10**400, "loss is nan"),
        ("square_loss", "much", "mean squared loss is -1.0"),
        ("step_variance", "much", "step variance is nan"),
        ("step_variance", None, "step variance is nan"),
        ("num_steps", 10**30, "number of local steps is 0"),
        ("num_steps", None, "number of local steps is"),
        ("num_steps", "many", "number of local steps is 0"),
    ],
)
def test_a_number_that_is_none_costs_its_own_reply_alone(column: str, said: object, reason: str) -> None:
    info = closed(np.ones((3, 2), np.float32), **{column: [1, said, 1]})
    assert [(reply.client, reply.reason[: len(reason)]) for reply in info.rejected] == [(1, reason)]


def test_a_loss_that_nobody_said_is_no_fault() -> None:
    assert Reports.make(3, loss=[1.0, None, 2]).has_loss_n.tolist() == [True, False, True]
    assert not Reports.make(3).has_loss_n.any()
    assert Reports.make(3, loss=np.ones(3)).has_loss_n.all()
    assert not closed(np.ones((3, 2)), loss=[1.0, None, 2]).rejected


@pytest.mark.parametrize(
    "update", [np.ma.array([1.0, 2.0], mask=[False, True]), np.array([1 + 2j, 1])], ids=["masked", "complex"]
)
def test_updates_of_which_a_part_would_be_lost_are_refused(update: Any) -> None:
    info = closed([np.ones(2), update, np.ones(2)])
    assert [reply.client for reply in info.rejected] == [1]
    table = np.ma.array(np.ones((3, 2)), mask=[[False, True]] * 3)
    assert len(closed(table).rejected) == 3


@pytest.mark.parametrize("since", [np.array([1, 2]), "x", None, float("nan"), [-1]], ids=str)
def test_a_name_that_is_no_number_is_none(since: Any) -> None:
    replies = [RemoteReply(np.ones(2, np.float32), -1)] * 2 + [RemoteReply(np.ones(2, np.float32), since)]
    info = closed(replies, "uniform@@innovation-remote")
    assert [reply.client for reply in info.rejected] == [2]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Population.from_sizes([2**62] * 3), r"whole numbers, 1 to 2\^53"),
        (lambda: Population.from_sizes([2**64 - 1] * 2), r"whole numbers, 1 to 2\^53"),
        (lambda: Population.from_sizes([1, 2], aux=np.array([["a"], ["b"]])), "one row of numbers"),
        (lambda: Population.from_sizes([1, 2], aux=RAGGED), "one row of numbers"),
        (
            lambda: Population.from_sizes([1, 2], aux=[[1.0], [1e160]]),
            "of client 1 holds a number that is not finite, or",
        ),
        (
            lambda: make_plan("balanced", POPULATION._replace(aux_mq=np.array([[1.0], [np.nan], [2]])), 2),
            "of client 1 holds a number that is not finite",
        ),
        (lambda: Reports.make(2, loss=[[1], [1, 2]]), "loss must have one number for each of 2 clients"),
        (lambda: closed({0: np.ones(2)}), "updates are a dict; give a list"),
        (lambda: closed(None), "updates are a NoneType; give a list"),
        (lambda: closed(np.float32(3)), "updates are a float32; give a list"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(DeltaflError, match=sentence):
        make()


def test_large_sizes_have_positive_weights_that_sum_to_one() -> None:
    population = Population.from_sizes([2**53] * 3000)
    assert population.weight_m.min() > 0
    assert population.weight_m.sum() == pytest.approx(1)
