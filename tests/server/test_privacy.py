"""Differential privacy: what one update can do, how much noise there is, what is refused, and epsilon."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl import (
    SAMPLERS,
    Accumulator,
    Cohort,
    DeltaflError,
    DifferentialPrivacy,
    Plan,
    Population,
    RoundState,
    RunFacts,
    close_round,
    close_round_from_sum,
    init_round,
    make_plan,
    open_round,
)
from deltafl.estimators.table import ESTIMATORS
from deltafl.scale.state_file import flatten
from deltafl.server.privacy import needs_single_updates

SIZES, SEED = [5, 1, 3, 7], 2**40
DP = DifferentialPrivacy(clip=0.5, noise_multiplier=1e-9, delta=1e-5)
#: m max w / n = 4 * 7 / 16 / 2: what an update of norm 1 can move the estimate by.
MOST = 0.875


def plan_of(label: str = "uniform@poisson", dp: DifferentialPrivacy | None = DP, **more: Any) -> Plan:
    return make_plan(label, Population.from_sizes(SIZES, aux=np.eye(4)), n=2, **{"dp": dp, "seed": SEED, **more})


def test_no_client_moves_the_estimate_further_than_the_noise_is_made_for() -> None:
    """Whatever it sends, with anybody else in the cohort, and however often it was silent before."""
    plan = plan_of()
    start = init_round(plan, np.zeros(100))
    state = start._replace(selected_m=start.selected_m.plus_one(np.array([3] * 9)))
    moved = []
    for client in range(4):
        client_n = np.unique([0, client])
        cohort = Cohort(client_n, np.ones_like(client_n), np.full(len(client_n), 0.5), "poisson")
        for scale in (1e-3, 1.0, 1e9):
            update_nd = np.ones((len(cohort.client_n), 100), np.float32)
            others_nd = update_nd.copy()
            update_nd[-1] *= scale
            others_nd[-1] = 0
            with_d, without_d = (close_round(plan, state, cohort, u)[0].params_d for u in (update_nd, others_nd))
            moved.append(float(np.linalg.norm(with_d - without_d)))
    assert max(moved) == pytest.approx(MOST * DP.clip, rel=1e-5)
    assert max(moved) <= MOST * DP.clip + 1e-6
    assert min(moved) == pytest.approx(2 * 1 / 16 * 1e-3 * 10, rel=1e-3)  # short updates of light clients are as sent


def test_the_noise_has_the_scale_that_epsilon_is_counted_with_in_every_round() -> None:
    """Those with an empty cohort and those in which few are connected, too; no two rounds have the same."""
    dp = DifferentialPrivacy(clip=0.5, noise_multiplier=3.0, delta=1e-5)
    plan = plan_of(dp=dp)
    state = init_round(plan, np.zeros(20_000))
    nobody = np.zeros(0, dtype=np.int64)
    few = open_round(plan, state, np.array([True, True, True, False]))
    noise = []
    for cohort in (Cohort(nobody, nobody, nobody.astype(float), "poisson"), few, few):
        following, _ = close_round(plan, state, cohort, [np.zeros(20_000)] * len(cohort.client_n))
        noise.append(following.params_d)
    assert [row_d.std() for row_d in noise] == pytest.approx([3.0 * MOST * 0.5] * 3, rel=0.03)
    correlation = np.asarray(np.corrcoef(noise)) - np.eye(3)
    assert np.abs(correlation).max() < 0.05


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("pracdelta@poisson", "it learns from replies"),
        ("md@poisson", "one probability for all clients"),
        ("clustered-sampling-1", "one probability for all clients"),
        ("uniform", "'systematic' a client is not selected on its own"),
        ("md", "one probability for all clients"),
        ("fedavg@poisson", "with 'hajek' the most that one update"),
        ("uniform@poisson@difference", "with 'difference' the most"),
        ("uniform@poisson@innovation-remote", "with 'innovation-remote' the most"),
    ],
)
def test_where_epsilon_would_not_hold_dp_is_refused(label: str, reason: str) -> None:
    with pytest.raises(DeltaflError, match=f"dp with .*{reason}.*; write 'uniform@poisson'"):
        plan_of(label)


def test_a_seed_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(DeltaflError, match=r"seed is 7, .*write seed=secrets.randbits\(63\)"):
        plan_of(seed=7)
    with pytest.raises(DeltaflError, match="it must be in"):
        replace(DP, noise_multiplier=0.0)


def test_processes_do_not_add_noise_each() -> None:
    plan = plan_of()
    state = init_round(plan, np.zeros(3))
    group: Any = None
    with pytest.raises(DeltaflError, match="other noise in each process"):
        Accumulator(plan, state, open_round(plan, state)).merge(group)


def test_epsilon_is_that_of_the_gaussian_mechanism_and_falls_with_the_rate() -> None:
    """Without sampling it is known: delta(epsilon) = Phi(1/2z - eps z) - e^eps Phi(-1/2z - eps z), Balle, Wang 2018."""
    norm = pytest.importorskip("scipy.stats").norm
    dp = DifferentialPrivacy(clip=1.0, noise_multiplier=2.0, delta=1e-5)
    whole = dp.epsilon(rounds=4, rate=1.0)  # 4 rounds with z = 2 are one with z = 1
    assert norm.cdf(0.5 - whole) - np.exp(whole) * norm.cdf(-0.5 - whole) == pytest.approx(1e-5, rel=0.01)
    assert dp.epsilon(4, rate=2.0) == whole
    assert 0 < dp.epsilon(4, rate=0.01) < dp.epsilon(4, rate=0.1) < whole / 3


# Secure aggregation.


def any_plan(label: str) -> Plan:
    return plan_of(label, facts=RunFacts(num_classes=2), dp=None, seed=0)


def test_where_a_sum_is_enough_it_gives_the_same_states() -> None:
    """All that samplers and estimators learn is the same, with clients that do not reply, and others are refused."""
    enough = []
    for label in [*SAMPLERS, *(f"uniform@@{name}" for name in ESTIMATORS)]:
        plan = any_plan(label)
        single: RoundState = init_round(plan, np.zeros(5))
        from_sum = single
        if (reason := needs_single_updates(plan)) is not None:
            cohort = Cohort(np.arange(2), np.ones(2, dtype=np.int64), np.full(2, 0.5))
            with pytest.raises(DeltaflError, match=re.escape(f"a sum of updates is not enough: {reason}; write")):
                close_round_from_sum(plan, single, cohort, [True, True], np.ones(5))
            continue
        enough.append(label)
        for round in range(3):
            cohort = open_round(plan, single)
            update_nd = np.random.default_rng(round).normal(size=(len(cohort.client_n), 5))
            here = np.arange(len(update_nd)) != 1
            coef_n = plan.collect_replies(from_sum, cohort).coef_n
            from_sum, info = close_round_from_sum(plan, from_sum, cohort, here, (coef_n * here) @ update_nd)
            single, _ = close_round(
                plan, single, cohort, [u if h else None for u, h in zip(update_nd, here, strict=True)]
            )
            assert np.isnan(info.variance)
        for (name, array), (_, other) in zip(flatten(single), flatten(from_sum), strict=True):
            np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-6, err_msg=f"{label} {name}")
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
    listed = re.findall(r"`([\w@-]+)`", page.partition("A sum is enough for the samplers")[2].partition(".\n")[0])
    assert [name.replace("@@", "") for name in listed] == [label.removeprefix("uniform@@") for label in enough]


def test_the_page_names_the_estimators_that_remember_updates() -> None:
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| the last update, one model a client"))
    remembering = [name for name, rule in ESTIMATORS.items() if rule.control.remembers]
    assert re.findall(r"`([\w-]+)`", row.partition("estimators")[2].partition("(hence")[0]) == remembering
