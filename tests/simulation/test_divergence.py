"""Divergence: noticed, explained, ended at the last checkpoint, and shown; noisy runs are left
alone.
"""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from conftest import population_of
from deltafl.analysis import remarks
from deltafl.cli.main import app
from deltafl.server.watch import Watch
from deltafl.simulation.callbacks.callback import RoundDone
from deltafl.simulation.callbacks.divergence import likely_cause
from deltafl.simulation.callbacks.followers import watch_over
from deltafl.simulation.comparisons.comparing import run_comparison
from deltafl.simulation.folder.directory import DivergedError
from deltafl.simulation.folder.record import RunStore
from deltafl.simulation.judged import Evaluation, Judged
from deltafl.simulation.parallel.sweep import RoundReader
from deltafl.simulation.settings import CompareSettings, RunSettings, make_settings
from deltafl.simulation.setup import engine_of, plan_of, task_of
from deltafl.store import plain_json
from deltafl.types import RejectedReply, RoundInfo
from reproduction.measures import accuracy, late_loss
from reproduction.sweeps import records_of, write_page
from tools.simulation import TINY, lines_of, quiet, run, run_job
from tools.sweeps import sweep_of

RESULTS = Path(__file__).parents[2] / "results"
#: The first step is so long that the loss is thousands of times that at the start.
LOST = {**TINY, "server_lr": 1e6}
#: The loss is twenty times that at the start from the first round on.
HIGH = {
    "task": "digits",
    "clients": 100,
    "sample": 5,
    "local_epochs": 1,
    "local_lr": 0.5,
    "server_lr": 100.0,
}


def command(name: str, **given: object) -> tuple[int, str]:
    """Exit code and output of a command."""
    options = [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
    result = CliRunner().invoke(app, [name, *options])
    return result.exit_code, result.output


def info(norm: float = 1.0, loss: float = 1.0, **more: object) -> RoundInfo:
    """A healthy round of ten clients."""
    base = RoundInfo(0, 10, 10, [], norm, 0.1, 10.0, 0.1, 1.0, 0.5, loss, residual=0.5)
    return base._replace(**more)  # type: ignore[arg-type]


def end_of(watch: Watch, losses: list[float], accuracies: list[float]) -> int | None:
    """The index of the evaluation that ends a run of healthy rounds."""
    pairs = enumerate(zip(losses, accuracies, strict=True))
    return next((i for i, pair in pairs if watch.see(info(), True, *pair)), None)


@pytest.mark.parametrize(
    ("losses", "first", "rises", "end"),
    [
        # Infinite values, and a thousand references.
        ([2.0, np.nan], 2.3, False, 1),
        ([2.0, 2299.0], 2.3, False, None),
        ([2.0, 2301.0], 2.3, False, 1),
        # The reference is 1 nat at least: a trained model's start is no measure.
        ([900.0], 0.01, False, None),
        ([1001.0], 0.01, False, 0),
        # A high loss must stay high: some recover, others by their accuracy.
        ([30.0] * 19 + [22.9] + [30.0] * 19, 2.3, False, None),
        ([30.0] * 40, 2.3, False, 19),
        ([30.0 - 0.1 * i for i in range(60)], 2.3, False, None),
        ([30.0] * 40, 2.3, True, None),
        ([25.0 + i for i in range(60)], 2.3, False, 19),
    ],
)
def test_losses_that_end_a_run(
    losses: list[float], first: float, rises: bool, end: int | None
) -> None:
    accuracies = [0.1 + rises * i / 1000 for i in range(len(losses))]
    assert end_of(Watch(first, True), losses, accuracies) == end


def test_a_model_or_a_loss_that_is_not_finite_ends_a_run_whatever_the_metric() -> None:
    assert end_of(Watch(2.3, False), [2.0, 1e30, np.inf], [np.nan] * 3) == 2
    assert Watch(2.3, True).see(info(), False, None) == "the model has entries that are not finite"


@pytest.mark.parametrize(
    ("accuracies", "more", "end"),
    [
        # Of ten equal classes, 0.325 is a quarter of the way from chance to 1, 0.118 a fiftieth.
        ([0.85] * 5 + [0.1] * 40, {}, 24),
        ([0.326] + [0.117] * 40, {}, 20),
        ([0.324] + [0.1] * 400, {}, None),
        ([0.85] + [0.119] * 400, {}, None),
        ([0.1] * 40, {"first": 0.9}, 19),
        (([0.85] + [0.1] * 19 + [0.12]) * 9, {}, None),
        # No constant answer loses less than log(10); a test set of one class has no skill.
        ([0.85] + [0.1] * 400, {"loss": 2.3}, None),
        ([0.85] + [0.1] * 400, {"chance": np.nan}, None),
        ([1.0] * 400, {"chance": 1.0, "loss": 0.0}, None),
    ],
)
def test_a_skill_that_stays_lost_ends_a_run(
    accuracies: list[float], more: dict[str, float], end: int | None
) -> None:
    given = {"loss": 2.31, "chance": 0.1, "first": 0.1, **more}
    watch = Watch(2.3, True, given["chance"], given["first"])
    assert end_of(watch, [given["loss"]] * len(accuracies), accuracies) == end


def test_exploding_steps_make_one_high_loss_enough() -> None:
    watch = Watch(2.3, True)
    for _ in range(6):
        assert watch.see(info(), True, 2.0) is None
    assert not watch.wants_evaluation(info(norm=900.0))
    assert watch.wants_evaluation(info(norm=1100.0))
    assert watch.wants_evaluation(info(loss=24.0))
    assert watch.see(info(norm=1100.0), True, 2.0) is None  # the norm alone ends nothing
    assert watch.see(info(norm=1100.0), True, 30.0) is not None


def test_refused_replies_end_a_run_that_cannot_move() -> None:
    watch = Watch(2.3, True)
    gone = info(num_responded=0, rejected=[RejectedReply(1, "NaN")])
    found = [watch.see(one, True, 2.3) is None for one in (gone, gone, info(), gone, gone, gone)]
    assert found == [True] * 5 + [False]
    empty = info(num_selected=0, num_responded=0)  # an empty Poisson cohort is none
    assert [watch.see(empty, True, 2.3) for _ in range(9)] == [None] * 9


def judged(content: dict[str, Any]) -> int | None:
    """The index of the evaluation that ends a recorded run, as if its rounds had been healthy."""
    loss_r, accuracy_r = (
        np.array(content[name], dtype=float).tolist() for name in ("loss", "accuracy")
    )
    chance = 1 / 62 if content["settings"]["task"] == "unipen62" else 1 / 10
    return end_of(
        Watch(loss_r[0], content["metric"] == "accuracy", chance, accuracy_r[0]), loss_r, accuracy_r
    )


@pytest.mark.thorough
def test_the_runs_of_the_repository_are_judged_as_they_were() -> None:
    """Every tenth curve below results, noisy methods included; one that diverged ends where it
    did.
    """
    curves = 0
    for path in sorted(RESULTS.glob("*/runs/*.jsonl.gz")):
        for i, line in enumerate(gzip.decompress(path.read_bytes()).splitlines()):
            if i % 10 and b'"diverged":null' in line:
                continue
            content = json.loads(line)
            if content.get("diverged"):  # perhaps by a norm of D, which is not recorded
                assert judged(content) in (None, len(content["loss"]) - 1), path
            else:
                curves += 1
                assert judged(content) is None, path
    assert curves > 400  # of over 6000


def test_a_watch_goes_on_from_the_lines_of_a_run() -> None:
    """19 high losses before a resume, one after it."""
    task = task_of(make_settings(RunSettings, {"task": "digits"}))
    test = {"loss": 30.0, "accuracy": 0.1}
    lines = [plain_json({**info()._asdict(), "round": i, "test": test}) for i in range(1, 20)]
    watch = watch_over(task, [{"round": 0, "test": {"loss": 2.3, "accuracy": 0.1}}, *lines])
    assert watch.suspect is not None
    assert watch.see(info(), True, 30.0, 0.1) is not None


def test_chance_is_the_commonest_label_of_the_test_set() -> None:
    task = task_of(make_settings(RunSettings, {"task": "digits", "test_examples": 50}))
    label_e = task.dataset.test_y.tolist()
    assert task.chance == max(map(label_e.count, range(10))) / 50
    assert np.isnan(replace(task, metric="loss").chance)


STEADY = [info(1.0), info(1.1), info(1.0)]
LEAP = info(50.0)
NAN = [RejectedReply(3, "NaN"), RejectedReply(4, "NaN")]
HEAVY = info(50.0, round=3, largest_weight=2.5)
STALE = [info(norm, round=98 + i, residual=1.7) for i, norm in enumerate((1.0, 1.1, 9.0))]
OWN = "uniform@@difference-own"


@pytest.mark.parametrize(
    ("infos", "sampler", "words"),
    [
        ([*STEADY, LEAP], OWN, "lower local_lr, now 0.2, or take fewer"),
        ([*STEADY, info(50.0, rejected=NAN)], OWN, "^2 of the last 40 replies were refused"),
        ([*STEADY, HEAVY], OWN, "counted 2.5, 25 times an equal share, in round 4: raise floor"),
        # A large weight, but the norm grew in another round.
        ([*STEADY, info(1.0, largest_weight=2.5), LEAP], OWN, "fewer local steps"),
        (STALE, OWN, "every 100 rounds on average, and residuals are 1.7 times"),
        (STALE, OWN, "use a damped estimator, select more clients"),
        (STALE, f"{OWN}-damped", r"norms\): select more clients"),
        # Nobody was selected twice; the memory is empty; there is no memory.
        ([one._replace(round=50) for one in STALE], OWN, "fewer local steps"),
        ([one._replace(residual=1.0) for one in STALE], OWN, "fewer local steps"),
        (STALE, "uniform", "fewer local steps"),
    ],
)
def test_likely_causes(infos: list[RoundInfo], sampler: str, words: str) -> None:
    given = {"task": "digits", "clients": 1000, "sample": 10, "local_lr": 0.2, "sampler": sampler}
    settings = make_settings(RunSettings, given)
    plan = plan_of(settings, population_of([1] * 1000))
    assert re.search(words, likely_cause(infos, settings, plan))


def test_a_run_ends_at_its_last_checkpoint_with_the_reason(tmp_path: Path) -> None:
    words = r"round 1: the test loss is .*lower server_lr, now 1e\+06"
    with pytest.raises(DivergedError, match=words) as caught:
        run(tmp_path, **LOST, checkpoint_every=2)
    assert (caught.value.round, caught.value.kept) == (1, 0)
    assert lines_of(tmp_path)[-1]["diverged"]["kept"] == 0
    before = (tmp_path / "rounds.jsonl").read_bytes()
    # Cut off while it was recorded.
    for name, cut in (("rounds.jsonl", 0), ("rounds.jsonl", 7), ("timings.jsonl", 3)):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])
        with pytest.raises(DivergedError, match=re.escape(str(caught.value))):
            run(tmp_path, **LOST, checkpoint_every=2)
        assert (tmp_path / "rounds.jsonl").read_bytes() == before


def test_no_state_is_kept_while_the_loss_is_high(tmp_path: Path) -> None:
    """The loss is high for thirty evaluations before the run is ended; three checkpoints were
    due meanwhile.
    """
    with pytest.raises(DivergedError) as caught:
        run(tmp_path, **HIGH, rounds=60, sampler="pracdelta")
    losses = [line["test"]["loss"] for line in lines_of(tmp_path)]
    assert caught.value.round > 30
    assert losses[caught.value.kept] < 10 * losses[0] < min(losses[1:])


def test_a_suspect_end_is_reported_and_keeps_the_good_state(tmp_path: Path) -> None:
    """20 evaluations would have ended the run."""
    given = {**HIGH, "rounds": 12, "sampler": "uniform"}
    folder = tmp_path / "run"
    code, output = command("run", **given, out=folder)
    words = "suspect end after 12 rounds: .*likely cause: .*lower server_lr, now 100.*of round 0"
    assert code == 0 and re.search(words, output)
    assert lines_of(folder)[-1]["suspect"]["kept"] == 0
    before = (folder / "rounds.jsonl").read_bytes()
    model_d = load_file(folder / "suspect.safetensors")["params_d"]
    last = run(folder, **given)  # what is after the checkpoint is played again
    assert (folder / "rounds.jsonl").read_bytes() == before
    test = engine_of(make_settings(RunSettings, given)).evaluate(model_d)
    assert plain_json(test.line()) == last["test"]


def test_a_lost_skill_ends_a_run_at_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After round 7 the model answers as one that knows nothing; the checkpoints of rounds 10
    and 20 are not kept.
    """
    found = (Evaluation(2.4, 0.8 if round <= 7 else 0.1) for round in range(99))
    monkeypatch.setattr(Judged, "evaluation", lambda _: next(found))
    words = r"accuracy of the last 20 evaluations is no better .*it had been 80\.0%"
    with pytest.raises(DivergedError, match=words) as caught:
        run(tmp_path, **{**TINY, "rounds": 40, "checkpoint_every": 5})
    assert (caught.value.round, caught.value.kept) == (27, 5)


def test_commands_tell_how_runs_ended(tmp_path: Path) -> None:
    code, output = command("run", **LOST, out=tmp_path / "run")
    assert code == 3
    assert "diverged in round 1" in output and "state of round 0 is kept in" in output
    given = {**HIGH, "rounds": 3, "samplers": "uniform", "seeds": 1}
    code, output = command("compare", **given, out=tmp_path / "out")
    assert code == 0
    assert "uniform-seed0 has a suspect end after 3 rounds: the test loss is" in output


def test_a_reader_keeps_its_place_in_a_run_that_goes_on_after_a_suspect_end(
    tmp_path: Path,
) -> None:
    """It may have read the old last line before the run begins to write its lines anew."""
    run(tmp_path, **HIGH, rounds=3)
    told: list[RoundDone] = []
    settings = make_settings(RunSettings, {**HIGH, "rounds": 6})
    reader = RoundReader(tmp_path, settings, told.append)
    reader.read()
    run(tmp_path, **HIGH, rounds=6)
    for _ in range(2):
        reader.read()
    assert [done.round for done in told] == [4, 5, 6]


def test_runs_with_a_suspect_end_play_on_side_by_side(tmp_path: Path) -> None:
    """What their last line said of the end is said no more, so that later lines stand earlier."""
    out = tmp_path / "out"
    given = {**HIGH, "samplers": "uniform", "seeds": 2, "processes": 2}
    for rounds in (3, 6):
        code, output = command("compare", **given, rounds=rounds, out=out)
        assert code == 0, output
        for seed in (0, 1):
            lines = lines_of(out / "runs" / f"uniform-seed{seed}")
            assert len(lines) == rounds + 1 and "suspect" in lines[-1]


def test_a_comparison_goes_on_and_marks_it(tmp_path: Path) -> None:
    given = {**LOST, "samplers": "uniform,fedavg", "seeds": 1, "norm_guard": 3.0}
    summary = run_comparison(make_settings(CompareSettings, given), tmp_path / "out", quiet).numbers
    assert [entry.seeds[0].diverged_in for entry in summary.samplers] == [1, 1]
    text = " ".join(remarks(summary))
    assert "† Diverged: uniform (1 of 1 seed), fedavg (1 of 1 seed). A stopped run keeps" in text
    assert "Biased, all of them: norm_guard = 3" in text


def test_a_sweep_records_it_and_its_page_shows_it(tmp_path: Path) -> None:
    settings = {**TINY, "samplers": ["fedavg", "uniform"], "seeds": 1, "threshold": 0.5}
    parts = {"one": {"title": "Lost", "server_lr": 1e6}, "two": {"title": "Sound"}}
    sweep = sweep_of(settings=settings, parts=parts, order=[])
    for job in sweep.jobs():
        run_job(job, tmp_path)
        assert RunStore(tmp_path).get(job) is not None
    records = records_of(sweep, tmp_path)
    assert [record.diverged for record in records] == [1, 1, None, None]
    assert records[0].diverged_why.startswith("the test loss is")
    runs = [record.run() for record in records]
    assert accuracy(5).value(runs[0]) == records[0].accuracy[-1]
    assert np.isnan(late_loss("loss").value(runs[0]))
    page = write_page(sweep, runs, tmp_path / "page", {}, "command")
    assert "| FedAvg † |" in page
    assert "- Lost, FedAvg †, seed 0, in round 1: the test loss is" in page
    assert page.count("in round 1: the test loss is") == 2
    assert "| Uniform |" in page
