"""Twins: unbiased whatever is simulated, one simulation a round, bits that survive a resume,
faults in a sentence.
"""

import logging
from pathlib import Path

import numpy as np
import pytest

from conftest import Recorder, make_problem, mean_estimate, mean_square, play
from deltafl import (
    DeltaflError,
    Fixed,
    LearnedCoefficient,
    Plan,
    Population,
    RoundState,
    Twin,
    close_round,
    init_round,
    load_state,
    make_plan,
    make_sampler,
    open_round,
    save_state,
)
from deltafl.estimators.learned_coefficient import FixedCoefficient
from deltafl.estimators.own import OwnControl
from deltafl.types import FloatArray, Params

SIZES = [10, 15, 20, 25, 30]


def shrink(params_d: Params, population: Population, round: int) -> FloatArray:
    """Every client moves towards a point of its own, which its shares of three labels make: no
    truth in it.
    """
    assert population.aux_mq is not None
    return 0.3 * (population.aux_mq + 0.1 * round - params_d)


def forms() -> dict[str, Twin | LearnedCoefficient | FixedCoefficient]:
    memory = LearnedCoefficient(OwnControl())
    return {
        "plain": Twin(shrink),
        "learned": LearnedCoefficient(Twin(shrink)),
        "with a memory of residuals": LearnedCoefficient(Twin(shrink, memory)),
        "half": FixedCoefficient(Twin(shrink, OwnControl()), beta=0.5),
    }


class Follow(Recorder):
    """Remembers D, and moves the model a little, so that each round's twins are others."""

    def move(self, own, step):  # type: ignore[no-untyped-def]
        _, own = super().move(own, step)
        return (step.params_d + 0.1 * step.delta_d).astype(np.float32), own


@pytest.mark.parametrize(
    "label", ["uniform", "md-fixed@poisson", "balanced", "innovation@pivotal", "md"]
)
@pytest.mark.parametrize("form", forms())
def test_unbiased_whatever_is_simulated(label: str, form: str) -> None:
    """By enumeration, in a state that four real rounds have reached."""
    problem = make_problem(SIZES, seed=9)
    plan = Plan(problem.population, make_sampler(label), 3, forms()[form], (Follow(),), seed=1)
    state = play(
        plan, init_round(plan, np.zeros(3)), [make_problem(SIZES, seed=s) for s in range(4)]
    )
    value = plan.rule.control.value(state.control, np.arange(5))
    assert np.abs(value.control_nd).max() > 0.01
    np.testing.assert_allclose(
        value.total_d, problem.population.weight_m @ value.control_nd, atol=1e-12
    )
    np.testing.assert_allclose(mean_estimate(plan, state, problem), problem.ubar_d, atol=1e-12)


def test_twins_that_are_right_leave_no_error_and_half_of_them_a_quarter() -> None:
    problem = make_problem([1] * 5)
    for estimator, share in (
        (Twin(lambda *_: problem.update_md), 0),
        (Twin(lambda *_: problem.update_md / 2), 0.25),
    ):
        plans = [
            Plan(problem.population, Fixed("poisson"), 2, e, (Recorder(),))
            for e in (estimator, "horvitz-thompson")
        ]
        error, plain = (mean_square(plan, init_round(plan, np.zeros(3)), problem) for plan in plans)
        assert error == pytest.approx(share * plain, abs=1e-12)


def test_a_twin_much_longer_than_the_others_is_shortened() -> None:
    """Norms 5, 1, 2, 3, 100: the median is 3, so that none is longer than 6; the simulation's
    own array stays.
    """
    given_md = np.array(
        [[3.0, 4, 0], [1, 0, 0], [0, 2, 0], [0, 0, 3], [0, 60, 80]], dtype=np.float32
    )
    kept_md = given_md.copy()
    plan = Plan(
        make_problem(SIZES).population, make_sampler("uniform"), 3, Twin(lambda *_: given_md)
    )
    value = plan.rule.control.value(init_round(plan, np.zeros(3)).control, np.arange(5))
    np.testing.assert_allclose(value.control_nd, [*given_md[:4], [0, 3.6, 4.8]], rtol=1e-6)
    np.testing.assert_array_equal(given_md, kept_md)


def test_by_hand_and_one_simulation_a_round_of_the_new_model() -> None:
    """Sizes 1 and 3: sum w_j g_j = (1/4) 2 + (3/4) 4 = 3.5, and the memory holds what the twin
    left, 5 - 4.
    """
    calls = []

    def simulate(params_d: Params, population: Population, round: int) -> list[list[float]]:
        calls.append((round, params_d.tolist()))
        return [[2.0 + round], [4.0 + round]]

    plan = Plan(
        Population.from_sizes([1, 3]),
        Fixed("systematic", by_weight=True),
        1,
        Twin(simulate, OwnControl()),
    )
    state = init_round(plan, np.zeros(1))
    cohort = open_round(plan, state)
    client = int(cohort.client_n[0])
    value = plan.rule.control.value(state.control, np.array([1, 0]))
    assert (value.total_d.tolist(), value.control_nd.tolist()) == ([3.5], [[4.0], [2.0]])
    following, _ = close_round(plan, state, cohort, [np.array([5.0], dtype=np.float32)])
    left = 5.0 - (2.0, 4.0)[client]
    weight = (0.25, 0.75)[client]
    assert following.params_d.tolist() == [3.5 + left]  # md: one draw by weight
    assert calls == [(0, [0.0]), (1, [3.5 + left])]
    after = plan.rule.control.value(following.control, np.array([client]))
    assert after.control_nd.tolist() == [[(3.0, 5.0)[client] + left]]
    assert after.total_d.tolist() == [4.5 + weight * left]


def test_a_loaded_state_goes_on_in_the_same_bits(tmp_path: Path) -> None:
    problem = make_problem(SIZES)
    estimator = LearnedCoefficient(Twin(shrink, LearnedCoefficient(OwnControl())))
    plan = Plan(problem.population, make_sampler("balanced"), 3, estimator, seed=1)
    whole = play(
        plan, init_round(plan, np.zeros(3)), [make_problem(SIZES, seed=s) for s in range(6)]
    )
    half = play(
        plan, init_round(plan, np.zeros(3)), [make_problem(SIZES, seed=s) for s in range(3)]
    )
    save_state(tmp_path / "state", half, plan)
    assert "0x" not in plan.rule.name  # which the file compares
    loaded: RoundState = load_state(tmp_path / "state", plan)
    again = play(plan, loaded, [make_problem(SIZES, seed=s) for s in range(3, 6)])
    np.testing.assert_array_equal(again.params_d, whole.params_d)


def test_a_simulation_that_diverged_is_0_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def simulate(params_d: Params, population: Population, round: int) -> FloatArray:
        bad_md = np.ones((5, 3))
        bad_md[2] = (np.nan, 1e300)[round], 0, 0  # the second is not finite in float32
        return bad_md

    problem = make_problem(SIZES)
    plan = Plan(problem.population, make_sampler("uniform"), 3, Twin(simulate), (Recorder(),))
    with caplog.at_level(logging.WARNING):
        state = play(plan, init_round(plan, np.zeros(3)), [problem])
    assert not plan.rule.control.value(state.control, np.arange(5)).control_nd.any()
    why = (
        "the simulation of client 2 is not finite, so that this round has no twins; lower its "
        "learning rate"
    )
    assert [record.getMessage() for record in caplog.records] == [
        f"round 1: {why}",
        f"round 2: {why}",
    ]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (
            np.zeros((4, 3)),
            r"simulate returned shape \(4, 3\); return one update for each client, \(5, 3\)",
        ),
        (np.zeros(3), r"simulate returned shape \(3,\); return one update"),
        (None, r"simulate (must return numbers|returned shape \(\)).*\(5, 3\)"),
        (
            [[1.0], [1.0, 2.0]],
            r"simulate must return numbers, one update for each client, \(5, 3\)",
        ),
        ("twins", "simulate must return numbers, one update for each client"),
    ],
)
def test_wrong_shapes_are_refused_in_a_sentence(returned: object, said: str) -> None:
    plan = make_plan("uniform", SIZES, 2, estimator=Twin(lambda *_: returned))  # type: ignore[arg-type]
    with pytest.raises(DeltaflError, match=said):
        init_round(plan, np.zeros(3))


def test_the_name_alone_has_no_simulation() -> None:
    plan = make_plan("balanced@@twin(memory=0.5)", make_problem(SIZES).population, 2)
    control = plan.rule.control
    assert isinstance(control, LearnedCoefficient)
    assert control.memory == 0.5
    with pytest.raises(
        DeltaflError, match=r"a twin needs a simulation of the clients: write estimator=Twin"
    ):
        init_round(plan, np.zeros(3))
