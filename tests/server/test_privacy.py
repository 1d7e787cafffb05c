"""Differential privacy: what one update can do, how much noise there is, what is refused,
epsilon; secure sums.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import log_ndtr, ndtr

import deltafl
from deltafl import (
    SAMPLERS,
    Cohort,
    DeltaflError,
    DifferentialPrivacy,
    Plan,
    Population,
    close_round,
    init_round,
    make_plan,
    make_sampler,
    open_round,
)
from deltafl.estimators.table import ESTIMATORS
from deltafl.scale.named_arrays import named_arrays
from tools.samplers import mean_counts

DP = DifferentialPrivacy(clip=0.5, noise_multiplier=1e-9, delta=1e-5)
#: m max w / n = 4 * 7 / 16 / 2: what an update of norm 1 can move the estimate by.
MOST = 0.875
PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "secure-aggregation.md").read_text()


def plan_of(
    label: str = "uniform@poisson", dp: DifferentialPrivacy | None = DP, seed: int = 2**40
) -> Plan:
    population = deltafl.Population.from_sizes([5, 1, 3, 7], aux=np.eye(4))
    return deltafl.make_plan(
        label, population, n=2, facts=deltafl.RunFacts(num_classes=2), dp=dp, seed=seed
    )


def cohort_of(*clients: int) -> Cohort:
    return Cohort(
        np.array(clients, int), np.ones(len(clients), int), np.full(len(clients), 0.5), "poisson"
    )


def test_no_client_moves_the_estimate_further_than_the_noise_is_made_for() -> None:
    """Whatever it sends, with anybody else in the cohort, and however often it was silent
    before.
    """
    plan = plan_of()
    moved = []
    start = init_round(plan, np.zeros(100))
    state = start._replace(selected_m=start.selected_m.plus_one(np.array([3] * 9)))
    for cohort in (cohort_of(0), cohort_of(0, 1), cohort_of(0, 3)):
        for scale in (0.0, 1e-3, 1.0, 1e9):
            update_nd = np.ones((len(cohort.client_n), 100), np.float32)
            update_nd[-1] *= scale
            moved.append(close_round(plan, state, cohort, update_nd)[0].params_d)
    length_k = [float(np.linalg.norm(moved[i] - moved[i // 4 * 4])) for i in range(12)]
    assert max(length_k) == pytest.approx(MOST * DP.clip, rel=1e-5)
    assert max(length_k) <= MOST * DP.clip + 1e-6
    assert length_k[5] == pytest.approx(
        2 * 1 / 16 * 1e-3 * 10, rel=1e-3
    )  # short updates are as sent


def test_the_noise_has_the_scale_that_epsilon_is_counted_with_in_every_round() -> None:
    """Those with an empty cohort and those in which few are connected, too; no two rounds have
    the same.
    """
    plan = plan_of(dp=DifferentialPrivacy(clip=0.5, noise_multiplier=3.0, delta=1e-5))
    state = init_round(plan, np.zeros(20_000))
    noise = []
    few = open_round(plan, state, np.array([True, True, True, False]))
    for cohort in (cohort_of(), few, few):
        noise.append(
            close_round(plan, state, cohort, [np.zeros(20_000)] * len(cohort.client_n))[0].params_d
        )
    assert [row_d.std() for row_d in noise] == pytest.approx([3.0 * MOST * 0.5] * 3, rel=0.03)
    assert np.abs(np.asarray(np.corrcoef(noise)) - np.eye(3)).max() < 0.05


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ("pracdelta@poisson innovation", "it learns from replies"),
        (
            "md@poisson md clustered-sampling-1 uniform(per_second=True)@poisson",
            "one probability for all clients",
        ),
        ("uniform uniform@multinomial", "a client is not selected on its own"),
        (
            "fedavg@poisson uniform@poisson@difference",
            "the most that one update",
        ),
    ],
)
def test_where_epsilon_would_not_hold_dp_is_refused(labels: str, reason: str) -> None:
    for label in labels.split():
        with pytest.raises(DeltaflError, match=f"dp with .*{reason}.*; write 'uniform@poisson'"):
            plan_of(label)


@pytest.mark.parametrize(
    "label", [f"{name}@poisson" for name, row in SAMPLERS.items() if row.design is not None]
)
def test_with_dp_all_clients_have_one_probability(label: str) -> None:
    """By the draws' own probabilities, for every sampler and switch that is not refused."""
    unequal = Population.from_sizes([1, 2, 3, 40])._replace(seconds_m=np.array([1.0, 2, 3, 400]))
    switches = [key for key, value in vars(make_sampler(label)).items() if value is False]
    name, _, design = label.partition("@")
    for own in [label, *(f"{name}({switch}=True)@{design}" for switch in switches)]:
        try:
            plan = make_plan(own, unequal, 2, dp=DP, seed=2**40)
        except DeltaflError:
            continue
        assert mean_counts(plan.sampler, plan.sampler.init(unequal), 2, 4) == pytest.approx(
            [0.5] * 4
        )


def test_guessed_seeds_and_no_noise_are_refused() -> None:
    with pytest.raises(DeltaflError, match=r"seed is 7, .*write seed=secrets.randbits\(63\)"):
        plan_of(seed=7)
    with pytest.raises(DeltaflError, match="it must be in"):
        DifferentialPrivacy(1.0, 0.0, 1e-5)


def test_epsilon_is_that_of_the_gaussian_mechanism_and_falls_with_the_rate() -> None:
    """Without sampling it is known: delta(epsilon) = Phi(1/2z - eps z) - e^eps Phi(-1/2z - eps
    z), Balle, Wang 2018.
    """
    norm = pytest.importorskip("scipy.stats").norm
    pytest.importorskip("dp_accounting")
    dp = DifferentialPrivacy(clip=1.0, noise_multiplier=2.0, delta=1e-5)
    whole = dp.epsilon(rounds=4, rate=1.0)  # 4 rounds with z = 2 are one with z = 1
    assert norm.cdf(0.5 - whole) - np.exp(whole) * norm.cdf(-0.5 - whole) == pytest.approx(
        1e-5, rel=0.01
    )
    assert dp.epsilon(4, rate=2.0) == whole
    assert 0 < dp.epsilon(4, rate=0.01) < dp.epsilon(4, rate=0.1) < whole / 3


def test_where_a_sum_is_enough_it_gives_the_same_states() -> None:
    """All that samplers and estimators learn is the same, with clients that do not reply; others
    are refused.
    """
    enough = []
    for label in [*deltafl.SAMPLERS, *(f"uniform@@{name}" for name in ESTIMATORS)]:
        plan = plan_of(label, dp=None, seed=0)
        single = from_sum = init_round(plan, np.zeros(5))
        if (reason := plan.needs_single_updates) is not None:
            with pytest.raises(
                DeltaflError, match=re.escape(f"a sum of updates is not enough: {reason}; write")
            ):
                deltafl.close_round_from_sum(plan, single, cohort_of(0), [True], np.ones(5))
            continue
        enough.append(label.removeprefix("uniform@@"))
        for round in range(3):
            cohort = open_round(plan, single)
            update_nd = np.random.default_rng(round).normal(size=(len(cohort.client_n), 5))
            here_n = np.arange(len(update_nd)) != 1
            sum_d = plan.collect_replies(from_sum, cohort).coef_n * here_n @ update_nd
            from_sum, info = deltafl.close_round_from_sum(plan, from_sum, cohort, here_n, sum_d)
            replies = [
                update_d if replied else None
                for update_d, replied in zip(update_nd, here_n, strict=True)
            ]
            single, _ = close_round(plan, single, cohort, replies)
            assert np.isnan(info.variance)
        for (name, array), (_, other) in zip(
            named_arrays(single), named_arrays(from_sum), strict=True
        ):
            np.testing.assert_allclose(
                array, other, rtol=1e-5, atol=1e-6, err_msg=f"{label} {name}"
            )
    assert (
        re.findall(r"`(.+?)`", PAGE.partition("A sum is enough")[2].partition(".\n")[0]) == enough
    )


def test_the_lines_of_the_page_close_a_round_from_a_sum() -> None:
    plan = plan_of("uniform", dp=None, seed=0)
    state = init_round(plan, np.zeros(5))
    cohort = open_round(plan, state)
    update_nd = np.random.default_rng(0).normal(size=(2, 5))
    names: dict[str, Any] = {"plan": plan, "state": state, "cohort": cohort}
    names["responded_n"] = np.ones(2, bool)
    names["close_round_from_sum"] = deltafl.close_round_from_sum
    first, second = PAGE.partition("```python\n")[2].partition("```")[0].split("# the server gets")
    exec(first, names)
    names["sum_d"] = names["coef_n"] @ update_nd
    exec(f"#{second}", names)
    expected, _ = close_round(plan, state, cohort, update_nd)
    np.testing.assert_allclose(names["state"].params_d, expected.params_d, rtol=1e-6)


@pytest.mark.parametrize("responded", [[0, 1], [True] * 3, ["yes", "no"]])
def test_who_is_in_a_sum_is_a_mask(responded: Any) -> None:
    """Not the clients' numbers, of which 0 would be False."""
    plan = plan_of("uniform", dp=None, seed=0)
    state = init_round(plan, np.zeros(5))
    with pytest.raises(
        DeltaflError, match=r"responded_n is .*; it must hold True or False for each of 2 clients"
    ):
        deltafl.close_round_from_sum(plan, state, open_round(plan, state), responded, np.ones(5))


def delta_of(epsilon: float, noise: float, rounds: int) -> float:
    """Of the Gaussian mechanism, exactly (Balle and Wang 2018), without sampling."""
    sigma = noise / np.sqrt(rounds)
    low = log_ndtr(-epsilon * sigma - 1 / (2 * sigma))
    return float(ndtr(-epsilon * sigma + 1 / (2 * sigma)) - np.exp(epsilon + low))


@pytest.mark.parametrize("noise", [1e-3, 0.01, 0.05, 0.0999])
@pytest.mark.parametrize("rounds", [1, 10, 1000])
def test_epsilon_of_little_noise_is_a_bound_that_is_nearly_reached(
    noise: float, rounds: int
) -> None:
    """It was infinite."""
    epsilon = DifferentialPrivacy(1.0, noise, 1e-5).epsilon(rounds, 0.1)
    assert delta_of(epsilon, noise, rounds) <= 1e-5 < delta_of(0.85 * epsilon, noise, rounds)


def test_epsilon_of_more_losses_than_memory_holds_is_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ended in a MemoryError."""

    def full(*_: object) -> None:
        raise MemoryError

    counted = DifferentialPrivacy(1.0, 0.5, 1e-5).epsilon(100, 1.0)
    monkeypatch.setattr("dp_accounting.pld.PLDAccountant.compose", full)
    bound = DifferentialPrivacy(1.0, 0.5, 1e-5).epsilon(100, 1.0)
    assert counted < bound < 1.1 * counted


def test_epsilon_of_no_round_of_no_noise_and_of_no_number() -> None:
    dp = DifferentialPrivacy(1.0, 1.0, 1e-5)
    assert dp.epsilon(0, 0.1) == 0
    for rounds, rate in ((-1, 0.1), (1.5, 0.1), (10, np.nan), (10, 0.0)):
        with pytest.raises(DeltaflError, match="; write "):
            dp.epsilon(rounds, rate)  # type: ignore[arg-type]
