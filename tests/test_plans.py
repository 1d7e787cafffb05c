"""Plans from labels: the estimator goes with the name, and what is no sampler is refused."""

import re

import numpy as np
import pytest

from deltafl import (
    SAMPLERS,
    DeltaflError,
    Plan,
    Population,
    PracDelta,
    Sgd,
    close_round,
    init_round,
    make_plan,
    make_sampler,
    open_round,
)
from deltafl.samplers import parse_label

POPULATION = Population.from_sizes([3, 1, 2, 4])


@pytest.mark.parametrize("label", [*SAMPLERS, "pracdelta@pivotal@difference", "innovation@local-pivotal"])
def test_a_plan_has_the_design_and_the_estimator_of_its_label(label: str) -> None:
    plan, parsed = make_plan(label, POPULATION, 2, seed=7), parse_label(label)
    assert (plan.estimator, plan.n, plan.seed) == (parsed.estimator, 2, 7)
    assert plan.sampler == make_sampler(label)


def test_fedvarp_by_name_subtracts_its_memory() -> None:
    """Clients that stand still: a memory of each makes the estimate exact, which uniform sampling never is."""
    update_md = np.random.default_rng(0).normal(size=(4, 5))
    plan = make_plan("fedvarp", POPULATION, 2, server_optimizer=Sgd(1.0))
    state = init_round(plan, np.zeros(5))
    for _ in range(40):
        cohort, before_d = open_round(plan, state), state.params_d
        state, _ = close_round(plan, state, cohort, update_md[cohort.client_n])
    np.testing.assert_allclose(state.params_d - before_d, POPULATION.weight_m @ update_md, atol=1e-5)


def test_options_and_another_estimator_can_be_given() -> None:
    plan = make_plan("pracdelta(floor=0.3)", POPULATION, 2, estimator="difference")
    assert plan.sampler == PracDelta(floor=0.3)
    assert plan.estimator == "difference"


def test_names_in_the_place_of_objects_are_refused() -> None:
    with pytest.raises(
        DeltaflError, match=re.escape("sampler is 'pracdelta'; give a deltafl.Sampler, or write make_plan(")
    ):
        Plan(POPULATION, "pracdelta", 2)  # type: ignore[arg-type]
    with pytest.raises(DeltaflError, match="server_optimizer is 'adam'; write make_server_optimizer"):
        Plan(POPULATION, make_sampler("uniform"), 2, server_optimizer="adam")  # type: ignore[arg-type]
    with pytest.raises(DeltaflError, match="unknown sampler 'pracdelt'"):
        make_plan("pracdelt", POPULATION, 2)
    with pytest.raises(DeltaflError, match="a label is text such as 'innovation', this is Population"):
        make_plan(POPULATION, "pracdelta", 2)  # type: ignore[arg-type]
