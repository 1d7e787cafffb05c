"""Differential privacy: what one update can do, how much noise there is, what is refused, and epsilon."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deltafl import (
    Accumulator,
    Cohort,
    DeltaflError,
    DifferentialPrivacy,
    Plan,
    Population,
    close_round,
    init_round,
    make_plan,
    open_round,
)

SIZES, SEED = [5, 1, 3, 7], 2**40
DP = DifferentialPrivacy(clip=0.5, noise_multiplier=1e-9, delta=1e-5)
#: m max w / n = 4 * 7 / 16 / 2: what an update of norm 1 can move the estimate by.
MOST = 0.875


def plan_of(label: str = "uniform@poisson", dp: DifferentialPrivacy = DP, **more: Any) -> Plan:
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
