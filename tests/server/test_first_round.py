"""A full first round: who is selected, where the model goes, what is remembered of it, and what it
costs, whatever the sampler.
"""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl import (
    DeltaflError,
    Population,
    close_round,
    init_round,
    make_plan,
    open_round,
)
from deltafl.estimators.two_bits import KEPT, code_length, decode, encode
from deltafl.federation.exchange import CENSUS, CODE, TRAINED, census_question, report_of
from deltafl.federation.replies import ClientReply, read_numbers, read_reply
from deltafl.samplers import SAMPLERS, make_sampler
from deltafl.server.privacy import DifferentialPrivacy
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import (
    CompareSettings,
    RunSettings,
    make_settings,
    refuse_ignored,
)
from deltafl.types import Reports
from federation.tools import admit, federation, sizes_of
from tools.simulation import TINY, StopError, lines_of, run, stop_after

M = 12
D = 300
SIZES = [5 + 3 * i for i in range(M)]
REAL = [
    name
    for name in SAMPLERS
    if not make_sampler(name).needs_oracle and make_sampler(name).census is None
]


def population() -> Population:
    shares = np.random.default_rng(2).dirichlet(np.ones(4), M)
    return Population.from_sizes(SIZES)._replace(aux_mq=shares)


def updates(seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(M, D)).astype(np.float32)


@pytest.mark.parametrize("label", REAL)
def test_everybody_trains_once_whatever_the_sampler(label: str) -> None:
    plan = make_plan(label, population(), 3, first_round="exact")
    state = init_round(plan, np.zeros(D))
    cohort = open_round(plan, state)
    assert cohort.client_n.tolist() == list(range(M))
    reports = Reports.make(M, loss=np.ones(M))
    state, info = close_round(plan, state, cohort, updates(), reports)
    mean_d = plan.population.weight_m @ updates().astype(float)
    np.testing.assert_allclose(state.params_d, mean_d, atol=1e-6)
    assert info.sum_of_weights == pytest.approx(1)
    # From then on the sampler draws, from what it has learnt.
    for _ in range(3):
        cohort = open_round(plan, state)
        assert (len(cohort.client_n) == M) == (label == "full")
        reports = Reports.make(len(cohort.client_n), loss=np.ones(len(cohort.client_n)))
        state, _ = close_round(plan, state, cohort, updates()[cohort.client_n], reports)


@pytest.mark.parametrize("label", ["fedvarp", "innovation@local-pivotal"])
def test_what_is_remembered_is_what_was_sent(label: str) -> None:
    """Where clients send the same again, nothing is left to chance in the second round."""
    plan = make_plan(label, population(), 3, first_round="exact")
    state = init_round(plan, np.zeros(D))
    state, _ = close_round(plan, state, open_round(plan, state), updates())
    first_d = state.params_d
    cohort = open_round(plan, state)
    state, info = close_round(plan, state, cohort, updates()[cohort.client_n])
    np.testing.assert_allclose(state.params_d - first_d, first_d, atol=1e-5)
    assert info.variance == pytest.approx(0, abs=1e-8)


def test_the_second_round_is_unbiased() -> None:
    """Over all cohorts that it may draw, each with its probability."""
    plan = make_plan("fedvarp", SIZES[:6], 2, first_round="exact")
    state = init_round(plan, np.zeros(4))
    first_md, second_md = np.random.default_rng(1).normal(size=(2, 6, 4)).astype(np.float32)
    state, _ = close_round(plan, state, open_round(plan, state), first_md)
    target_d = plan.population.weight_m @ second_md.astype(float)
    cohort = open_round(plan, state)
    np.testing.assert_allclose(cohort.expected_n, 2 / 6)
    steps = []
    for pair in combinations(range(6), 2):
        drawn = cohort._replace(client_n=np.array(pair))
        following, _ = close_round(plan, state, drawn, second_md[list(pair)])
        steps.append(following.params_d - state.params_d)
    assert np.std(steps, axis=0).max() > 0.1
    np.testing.assert_allclose(np.mean(steps, axis=0), target_d, atol=1e-6)


def test_who_is_away_or_silent_is_left_out_of_the_mean() -> None:
    plan = make_plan("uniform", SIZES, 3, first_round="exact")
    state = init_round(plan, np.zeros(D))
    here_m = np.arange(M) != 4
    cohort = open_round(plan, state, here_m)
    assert cohort.client_n.tolist() == np.flatnonzero(here_m).tolist()
    sent = [None if client == 7 else updates()[client] for client in cohort.client_n]
    state, _ = close_round(plan, state, cohort, sent)
    weight_m = plan.population.weight_m * here_m * (np.arange(M) != 7)
    np.testing.assert_allclose(
        state.params_d, weight_m @ updates().astype(float) / weight_m.sum(), atol=1e-6
    )


def test_a_code_is_read_as_its_client_wrote_it() -> None:
    plan = make_plan("fedvarp", SIZES, 3, first_round="code")
    state = init_round(plan, np.zeros(D))
    cohort = open_round(plan, state)
    read_md = plan.as_sent(cohort, updates())
    slow_md = [decode(encode(update_d)[None], D)[0] / KEPT for update_d in updates()]
    np.testing.assert_allclose(read_md, slow_md, rtol=1e-6)
    # As long as the updates, on average, and nearly in their direction.
    inner_m = np.einsum("md,md->m", read_md, updates()) / (updates() ** 2).sum(axis=1)
    assert 0.97 < inner_m.mean() < 1.03
    state, _ = close_round(plan, state, cohort, read_md)
    later = open_round(plan, state)
    assert plan.as_sent(later, updates()[:3]) is not read_md
    np.testing.assert_array_equal(plan.as_sent(later, updates()[:3]), updates()[:3])


@pytest.mark.parametrize(
    ("label", "settings", "words"),
    [
        ("census", {"first_round": "code"}, "leave out first_round"),
        ("uniform", {"first_round": "yes"}, "write 'exact'"),
        ("uniform", {"first_round": True}, "write 'exact'"),
        (
            "uniform@poisson",
            {
                "first_round": "exact",
                "dp": DifferentialPrivacy(1.0, 1.0, 1e-3),
                "seed": 2**40,
            },
            "leave out one of them",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    label: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(DeltaflError, match=words):
        make_plan(label, SIZES, 3, **settings)


@pytest.mark.parametrize("kind", ["exact", "code"])
def test_a_simulated_run_counts_it_and_resumes(kind: str, tmp_path: Path) -> None:
    given = {**TINY, "sampler": f"fedvarp+scaffold+first_round={kind}"}
    run(tmp_path / "whole", **given)
    first, second = lines_of(tmp_path / "whole")[1:3]
    assert (len(first["cohort"]), len(second["cohort"])) == (12, 4)
    d = 650
    sent = 4 * d if kind == "exact" else 8 * code_length(d)
    assert first["bytes_up"] == 12 * (sent + 24)
    # Scaffold's corrections are sent in every round.
    assert first["bytes_down"] == 12 * 2 * 4 * d
    assert second["bytes_up"] == 4 * (4 * d + 24)
    for after in (1, 3):
        folder = tmp_path / f"stopped-{after}"
        with pytest.raises(StopError):
            run_single(make_settings(RunSettings, given), folder, stop_after(after))
        run(folder, **given)
        assert lines_of(folder) == lines_of(tmp_path / "whole")


def test_a_federation_reads_codes_and_whole_models() -> None:
    """Clients with the mod send a code, others their arrays; a code that is none is no reply."""
    model = {"x": np.zeros((3, 7), np.float32), "y": np.zeros(4, np.float32)}
    fed = federation("fedvarp", model, n=2, first_round="code")
    admit(fed, sizes_of(4))
    cohort = fed.open(fed.keys)
    (question,) = fed.questions(cohort)
    assert question.keys == fed.keys
    rng = np.random.default_rng(0)
    sent = fed.arrays()
    trained = [
        {name: part + rng.normal(size=part.shape).astype(np.float32) for name, part in sent.items()}
        for _ in range(4)
    ]
    report = report_of(question.asked, False, sent, trained[0])
    empty = {name: (lambda: np.zeros(0, np.float32)) for name in sent}
    replies = {
        0: read_reply(empty, {"loss": 1.0}, report),
        1: ClientReply(trained[1], loss=1.0),
        2: read_reply(empty, {"loss": 1.0}, {"code": report["code"][1:]}),
        3: read_reply(empty, {"loss": 1.0}, {"code": ["nan"] * len(report["code"])}),
    }
    info = fed.close(cohort, {fed.keys[client]: reply for client, reply in replies.items()})
    assert [reply.client for reply in info.rejected] == [2, 3]
    assert all("the code is not" in reply.reason for reply in info.rejected)
    vector_d = np.concatenate([part.ravel() for part in trained[0].values()])
    read_d = decode(encode(vector_d)[None], 25)[0] / KEPT
    other_d = np.concatenate([part.ravel() for part in trained[1].values()])
    weight_k = np.array([10, 15]) / 25
    np.testing.assert_allclose(
        fed.params_d, weight_k[0] * read_d + weight_k[1] * other_d, atol=1e-6
    )
    # Later rounds ask for whole updates.
    later = fed.open(fed.keys)
    assert all("code" not in question.asked for question in fed.questions(later))


def test_without_it_nothing_changes() -> None:
    plan = make_plan("fedvarp", SIZES, 3, first_round=None)
    assert plan.parts == make_plan("fedvarp", SIZES, 3).parts
    assert len(open_round(plan, init_round(plan, np.zeros(D))).client_n) == 3


def test_in_a_comparison_a_census_goes_without() -> None:
    given = {"samplers": ("census", "uniform"), "first_round": "exact"}
    settings = make_settings(CompareSettings, {**TINY, **given})
    runs = [settings.run(label, 0).model_dump() for label in settings.samplers]
    assert [run["first_round"] for run in runs] == [None, "exact"]
    alone = settings.model_copy(update={"samplers": ("census",)})
    with pytest.raises(DeltaflError, match="methods without a census have it"):
        refuse_ignored(alone, given)


@pytest.mark.parametrize("label", ["fedvarp+first_round=code", "census"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda array: (100 * array).astype(np.int8), "has type int8 .* expected float32"),
        (lambda array: array > 0, "has type bool .* expected float32"),
        (lambda array: array[:-1], r"shape \(2, 7\), expected float32 and \(3, 7\)"),
        (lambda array: None, "lacks 'x'"),
    ],
)
def test_who_has_other_arrays_sends_no_numbers_but_why(
    label: str, change: Callable[[Any], Any], words: str
) -> None:
    """The server sees neither arrays nor types where a code or an answer is all that is sent."""
    name, _, settings = label.partition("+")
    sent = {"x": np.ones((3, 7), np.float32), "y": np.zeros(4, np.float32)}
    changed = {"x": change(sent["x"]), "y": sent["y"]}
    received = {key: array for key, array in changed.items() if array is not None}
    if settings:
        asked: dict[str, Any] = {CODE: True, TRAINED: ["x", "y"]}
        read = ("the code", CODE)
    else:
        census = make_plan(name, [1] * 4, n=2).census
        assert census is not None
        asked = census_question(census, ["x", "y"], 1.0)
        read = ("the answer", CENSUS)
    report = report_of(asked, False, sent, received)
    with pytest.raises(DeltaflError, match=words):
        read_numbers(report[read[1]], 5, read[0])
    wide = {key: array.astype(np.float64) for key, array in sent.items()}
    assert isinstance(report_of(asked, False, sent, wide)[read[1]], list)
