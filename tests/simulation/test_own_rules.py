"""Rules and callbacks of a user's end a run: where, why, after a resume too, in any process, and no
other run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltafl as dl
from deltafl.simulation import (
    Callback,
    LiveRun,
    PlayedRound,
    RoundDone,
    RunDirectory,
    RunSettings,
    StopRun,
    make_settings,
    run_single,
)
from deltafl.simulation.folder.clients import note_clients, noted_clients
from tools.simulation import TINY, StopError, lines_of, quiet, stop_after

Lines = Sequence[dict[str, Any]]


def budget(lines: Lines) -> str | None:
    trainings = sum(len(line.get("cohort", ())) for line in lines)
    return f"{trainings} trainings" if trainings >= 12 else None


class After(Callback):
    """Ends each run after so many of the rounds that it has seen itself."""

    def __init__(self, rounds: int, why: str = "enough") -> None:
        self.left = rounds
        self.why = why

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        self.left -= 1
        if self.left <= 0:
            raise StopRun(self.why)


def settings_of(**given: object) -> RunSettings:
    return make_settings(RunSettings, {**TINY, "sampler": "uniform", **given})


def test_a_rule_ends_a_run_and_a_resume_does_not_go_on(tmp_path: Path) -> None:
    settings = settings_of(checkpoint_every=2)
    with pytest.raises(StopError):
        run_single(settings, tmp_path / "run", stop_after(1), callbacks=[budget])
    last = run_single(settings, tmp_path / "run", quiet, callbacks=[budget])
    assert (last["round"], last["stopped"]) == (3, "12 trainings")
    run_single(settings, tmp_path / "plain", quiet)
    lines = lines_of(tmp_path / "run")
    del lines[-1]["stopped"]
    assert lines == lines_of(tmp_path / "plain")[:4]
    # Neither without the rule nor with more rounds.
    for more in (settings, settings_of(checkpoint_every=2, rounds=9)):
        assert run_single(more, tmp_path / "run", quiet) == last
    (run,) = dl.load(tmp_path / "run").curves
    assert run.stopped and run.stopped_why == "12 trainings" and run.num_rounds == 3
    assert "12 trainings" in str(dl.load(tmp_path / "run"))


def test_a_round_that_is_not_evaluated_is_if_it_becomes_the_last(tmp_path: Path) -> None:
    last = run_single(
        settings_of(evaluate_every=4), tmp_path / "run", quiet, callbacks=[After(2), After(1)]
    )
    assert last["round"] == 1 and last["test"]["accuracy"] > 0
    assert RunDirectory(tmp_path / "run").is_finished(6)
    saved = RunDirectory(tmp_path / "run").saved()
    assert saved is not None and saved[0] == 1


@pytest.mark.parametrize("processes", [1, 2])
def test_a_rule_ends_its_run_only_and_alike_in_any_process(tmp_path: Path, processes: int) -> None:
    def everybody(lines: Lines) -> str | None:
        return "all were asked" if len(lines[-1].get("cohort", ())) == 12 else None

    given: dict[str, Any] = {key: value for key, value in TINY.items() if key != "task"}
    result = dl.compare(
        "digits",
        "uniform,full",
        seeds=[0, 1],
        out=tmp_path,
        processes=processes,
        progress=False,
        report=False,
        callbacks=[everybody, After(4)],
        **given,
    )
    ends = {(run.sampler, run.seed): (run.num_rounds, run.stopped_why) for run in result.curves}
    # A callback that remembers has a copy for each run, whoever plays it.
    assert ends == {
        ("uniform", 0): (4, "enough"),
        ("uniform", 1): (4, "enough"),
        ("full", 0): (1, "all were asked"),
        ("full", 1): (1, "all were asked"),
    }
    text = " ".join(str(result).split())
    assert "Stopped (enough): uniform (2 of 2 seeds)" in text
    assert "Stopped (all were asked): full (2 of 2 seeds)" in text


@pytest.mark.parametrize("why", ["", "a\nb\x1b[31m\ud800", 7, "x" * 5000])
def test_any_reason_is_kept_as_one_line(tmp_path: Path, why: Any) -> None:
    run_single(settings_of(rounds=2), tmp_path / "run", quiet, callbacks=[After(1, why)])
    kept = lines_of(tmp_path / "run")[-1]["stopped"]
    assert kept and kept.isprintable() and len(kept) <= 300


def test_a_model_that_is_lost_has_diverged_whatever_else_was_reached(tmp_path: Path) -> None:
    lost: list[RoundDone] = []
    settings = settings_of(local_lr=1e30, rounds=6)
    with pytest.raises(dl.simulation.DivergedError):
        run_single(settings, tmp_path / "run", lost.append, callbacks=[After(3)])
    last = lines_of(tmp_path / "run")[-1]
    assert "diverged" in last and "stopped" not in last
    assert lost[-1].line["diverged"] == last["diverged"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([After], r"callbacks has the class After; write an object: After\(\)"),
        ([3], "callbacks has 3; it takes functions of the lines so far"),
        (7, r"callbacks is 7; write callbacks=\[...\]"),
        ([lambda lines: 1 / 0], "the callback <lambda> failed in round 1 of uniform, seed 0"),
    ],
)
def test_what_is_no_callback_is_a_sentence(tmp_path: Path, given: Any, sentence: str) -> None:
    with pytest.raises(dl.DeltaflError, match=sentence):
        run_single(settings_of(), tmp_path / "run", quiet, callbacks=given)


class Failing(Callback):
    """Fails at one of the three moments."""

    def __init__(self, moment: str) -> None:
        setattr(self, moment, self._fail)

    def _fail(self, *_: Any) -> None:
        raise StopRun("too soon, or too late")


@pytest.mark.parametrize(
    ("moment", "when"),
    [("begin", "before the first round"), ("end", "after the last round")],
)
def test_what_fails_beside_the_rounds_is_a_sentence(moment: str, when: str, tmp_path: Path) -> None:
    with pytest.raises(dl.DeltaflError, match=f"callback Failing failed {when} of uniform, seed 0"):
        run_single(settings_of(), tmp_path / "run", quiet, callbacks=[Failing(moment)])


class Adding(Callback):
    """Adds an entry to the line of each round."""

    def __init__(self, name: str, value: Any) -> None:
        self.entry = {name: value}

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        round.line.update(self.entry)


def test_what_numpy_makes_is_added_to_a_line_as_numbers(tmp_path: Path) -> None:
    added = {"norm": np.float32(0.5), "of_each": np.arange(2), "none": np.float32("nan")}
    run_single(settings_of(rounds=1), tmp_path / "run", quiet, callbacks=[Adding("mine", added)])
    last = lines_of(tmp_path / "run")[-1]
    assert last["mine"] == {"norm": 0.5, "of_each": [0, 1], "none": None}


@pytest.mark.parametrize(("name", "value"), [("mine", {1, 2}), ("mine", 1j), ("cost", "much")])
def test_what_no_record_can_have_is_refused_before_it_is_written(
    name: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(dl.DeltaflError, match="the callback Adding failed in round 1"):
        run_single(settings_of(), tmp_path / "run", quiet, callbacks=[Adding(name, value)])
    # The same call without it goes on.
    assert run_single(settings_of(), tmp_path / "run", quiet)["round"] == 6


def test_a_rule_that_says_yes_as_numpy_does_has_its_name(tmp_path: Path) -> None:
    def plateau(lines: Lines) -> Any:
        return np.float64(len(lines)) > 2

    last = run_single(settings_of(), tmp_path / "run", quiet, callbacks=[plateau])
    assert (last["round"], last["stopped"]) == (2, "plateau ended it")


def test_on_round_hears_and_cannot_end_a_run(tmp_path: Path) -> None:
    def on_round(done: RoundDone) -> None:
        raise StopRun("enough")

    with pytest.raises(
        dl.DeltaflError, match=r"cannot end a run \(enough\): give the rule as call"
    ):
        run_single(settings_of(), tmp_path / "run", on_round)


DRAWS = """
from typing import NamedTuple

import numpy as np

from deltafl import ControlValue, ControlVariate


class State(NamedTuple):
    c_md: np.ndarray
    weight_m: np.ndarray


class Draws(ControlVariate):
    def init(self, population, num_params):
        return State(np.zeros((population.num_clients, num_params)), population.weight_m)

    def value(self, state, client_n):
        return ControlValue(state.weight_m @ state.c_md, state.c_md[client_n])

    def update(self, state, population, replies, update_nd):
        return state._replace(c_md=np.random.normal(size=state.c_md.shape))
"""


def test_what_an_estimator_of_yours_draws_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text(DRAWS)
    settings = settings_of(sampler=f"uniform@@{tmp_path}/draws.py:Draws")
    for name in ("once", "again"):
        np.random.seed(len(name))  # noqa: NPY002
        run_single(settings, tmp_path / name, quiet)
    assert lines_of(tmp_path / "once") == lines_of(tmp_path / "again")


class Draw(Callback):
    """Writes a number of NumPy's global generator into each line."""

    def begin(self, run: LiveRun) -> None:
        self.first = np.random.random()  # noqa: NPY002

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        round.line["drawn"] = [self.first, np.random.random()]  # noqa: NPY002


@pytest.mark.parametrize("sampler", ["uniform", "census"])
def test_what_a_callback_of_yours_draws_is_repeated(sampler: str, tmp_path: Path) -> None:
    """After a census, too, where it is the first round."""
    for name in ("once", "again"):
        np.random.seed(len(name))  # noqa: NPY002
        run_single(settings_of(sampler=sampler), tmp_path / name, quiet, callbacks=[Draw()])
    lines = lines_of(tmp_path / "once")
    assert [line["round"] for line in lines if "drawn" in line] == [*range(1, len(lines))]
    assert lines == lines_of(tmp_path / "again")


def test_clients_with_names_that_are_no_text_are_in_the_table(tmp_path: Path) -> None:
    """As os.listdir gives those of files that are not in UTF-8."""
    value_m = np.array([0.5])
    note_clients(tmp_path, np.array([3]), "loss", {1: value_m}, 1, ["cafe\udce9"], ["\udcff"])
    noted = noted_clients(tmp_path)
    assert (noted.names, noted.strata) == ([r"cafe\udce9"], [r"\udcff"])


@pytest.mark.parametrize("metric", ["accuracy", "mean_absolute_error"])
def test_values_per_client_have_four_decimals_and_small_errors_four_digits(
    metric: str, tmp_path: Path
) -> None:
    value_m = np.array([1.23456e-5, 0.0123456, 0.5, 12.345678, np.nan])
    note_clients(tmp_path, np.arange(5), metric, {1: value_m}, 1, (), ())
    small = [0.0, 0.0123] if metric == "accuracy" else [1.235e-5, 0.01235]
    assert noted_clients(tmp_path).rows == {1: [*small, 0.5, 12.3457, None]}
