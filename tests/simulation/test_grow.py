"""Comparisons that grow, reports that join folders, and runs that stop at the threshold."""

import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from deltafl.analysis import Summary
from deltafl.errors import DeltaflError
from deltafl.samplers.label import spelled
from deltafl.simulation.comparisons.comparing import run_comparison
from deltafl.simulation.comparisons.comparison import joined
from deltafl.simulation.comparisons.pilot import PlanSettings
from deltafl.simulation.comparisons.tune import TuneSettings
from deltafl.simulation.folder import continuing
from deltafl.simulation.folder.continuing import continued, grown
from deltafl.simulation.folder.directory import RunDirectory
from deltafl.simulation.settings import CompareSettings, RunSettings, make_settings
from tools.cli import deltafl_here
from tools.simulation import TINY, StopError, lines_of, quiet, reseal, run

SMALL = {**TINY, "rounds": 4, "threshold": 0.99}

#: A sampler and a schedule of the user's own.
OWN = """
from dataclasses import dataclass
from deltafl.samplers.delta import FedPracIS

@dataclass(frozen=True)
class Mine(FedPracIS):
    text: str = ""

def half(round):
    return 0.5
"""


def compare(out: Path, on_progress: Any = quiet, **given: object) -> Summary:
    return run_comparison(
        make_settings(CompareSettings, {**SMALL, **given}), out, on_progress
    ).numbers


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of four rounds; copy it before you change it."""
    folder = tmp_path_factory.mktemp("small") / "out"
    compare(folder, samplers="uniform", seeds=1)
    return folder


@pytest.fixture
def out(small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small, tmp_path / "out"))


def bits(folder: Path) -> tuple[bytes, bytes]:
    """The lines of a run's rounds and its last checkpoint."""
    tensors = load_file(folder / "checkpoint.safetensors")
    state = b"".join(array.tobytes() for _, array in sorted(tensors.items()))
    return (folder / "rounds.jsonl").read_bytes(), state


def test_a_comparison_grows_by_samplers_and_seeds(out: Path) -> None:
    before = (out / "runs" / "uniform-seed0" / "timings.jsonl").read_bytes()
    compare(out, samplers="full", seeds="3,5")
    summary = compare(out, samplers="uniform", seeds=1)
    assert [entry.sampler for entry in summary.samplers] == ["uniform", "full"]
    assert [[run.seed for run in entry.seeds] for entry in summary.samplers] == [[0, 3, 5]] * 2
    assert (out / "runs" / "uniform-seed0" / "timings.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("recorded", "again"),
    [
        ("pracdelta", "pracdelta()"),
        ("pracdelta@pivotal+average=0.5", "pracdelta()@pivotal+average=.50"),
        ("uniform+lr_schedule=mine.py:half", "uniform@systematic+lr_schedule={here}/mine.py:half"),
        ("delta(alpha=2.0)", "delta(alpha=2)"),
        ("census+scaffold", "census+scaffold=1"),
        (
            "uniform+lr_schedule=step(every=5,factor=0.5)",
            "uniform+lr_schedule=step(factor=.50,every=5)",
        ),
        ("mine.py:Mine", "{here}/mine.py:Mine"),
        ("{here}/mine.py:Mine", "./mine.py:Mine()"),
    ],
)
@pytest.mark.parametrize("kind", [CompareSettings, TuneSettings, PlanSettings])
def test_one_method_in_another_spelling_goes_on_as_it_is_recorded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[CompareSettings],
    recorded: str,
    again: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN)
    first, second = (label.format(here=tmp_path) for label in (recorded, again))
    before = make_settings(kind, {**TINY, "samplers": [first]})
    # As a command has it: what is recorded, and the option.
    now = make_settings(kind, {**before.model_dump(exclude_none=True), "samplers": [second]})
    assert grown(before, now).samplers == (first,)
    with pytest.raises(DeltaflError, match="are one method"):
        continued(make_settings(kind, {**TINY, "samplers": [first, second]}), tmp_path / "out")
    if kind is CompareSettings:
        rates = {**TINY, "samplers": [first], "rates": {second: 0.1}}
        own = {**TINY, "samplers": [second], "rates": {first: 0.1}}
        both = grown(make_settings(kind, rates), make_settings(kind, own))
        assert both.rates == {first: {"local_lr": 0.1}}
        with pytest.raises(DeltaflError, match="in two spellings"):
            make_settings(kind, {**own, "rates": {first: 0.1, second: 0.2}})


def test_what_was_played_as_two_methods_is_read_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of before 2 and 2.0 were found to be one number."""
    both = ("delta(alpha=1)", "delta(alpha=1.0)")
    rates = {both[0]: 0.1, both[1]: 0.2}
    given = {**SMALL, "rounds": 2, "seeds": 1, "samplers": both, "rates": rates}
    out = tmp_path / "out"
    with pytest.raises(DeltaflError, match="are one method"):
        run_comparison(make_settings(CompareSettings, given), out, quiet)
    assert not out.exists()
    with monkeypatch.context() as before:
        before.setattr(continuing, "_require_once", lambda _: None)
        compare(out, **given)
    words = ("--out", "out", "--resume", "--seeds", "2", "--processes", "1", "--no-report")
    done = deltafl_here("compare", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = joined([out])
    assert [one.sampler for one in found.curves] == [both[0]] * 2 + [both[1]] * 2
    runs = (out / "runs" / f"{label}-seed1" / "config.toml" for label in both)
    assert [tomllib.loads(path.read_text())["local_lr"] for path in runs] == [0.1, 0.2]
    more = (*both, "uniform", "uniform()")
    with pytest.raises(DeltaflError, match="uniform are one method"):
        compare(out, **{**given, "samplers": more})


def test_a_class_of_the_users_may_tell_an_int_from_a_float(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN)
    own = ("mine.py:Mine(floor=1)", "mine.py:Mine(floor=1.0)")
    settings = make_settings(CompareSettings, {**TINY, "samplers": own})
    assert continued(settings, tmp_path / "out")[0].samplers == own
    assert "(k=2.0)" in spelled("uniform+lr_schedule=mine.py:half(k=2.0)")


def test_a_respelled_method_is_not_played_again_and_joins(out: Path, tmp_path: Path) -> None:
    summary = compare(out, samplers="uniform()", seeds=2)
    assert [(entry.sampler, len(entry.seeds)) for entry in summary.samplers] == [("uniform", 2)]
    compare(tmp_path / "other", samplers="uniform()", seeds=[2])
    run(tmp_path / "run", **SMALL, sampler="uniform@systematic", seed=3)
    found = joined([out, tmp_path / "other", tmp_path / "run"])
    assert [(one.sampler, one.seed) for one in found.curves] == [("uniform", s) for s in range(4)]


@pytest.mark.parametrize(("one", "other"), [("a?b", "a*b"), ("a b", "a/b")])
def test_runs_that_would_share_a_folder_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: str, other: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN)
    first, second = (f"mine.py:Mine(text={text!r})" for text in (one, other))
    out = tmp_path / "out"
    with pytest.raises(DeltaflError, match="would both be called"):
        compare(out, samplers=[first, second], seeds=1)
    assert not out.exists()
    compare(out, samplers=[first], seeds=1, rounds=1)
    before = (out / "config.toml").read_bytes()
    with pytest.raises(DeltaflError, match="would both be called"):
        compare(out, samplers=[second], seeds=1, rounds=1)
    assert (out / "config.toml").read_bytes() == before


def test_a_label_with_settings_is_played_as_a_comparison_with_them(
    out: Path, tmp_path: Path
) -> None:
    own = {"average": 0.5, "server_optimizer": "momentum", "proximal": 0.1, "sample": 3}
    label = "+".join(["uniform", *(f"{name}={value}" for name, value in own.items())])
    summary = compare(out, samplers=f"full,{label}", seeds=1)
    assert [entry.sampler for entry in summary.samplers] == ["uniform", "full", label]
    compare(tmp_path / "all", samplers="uniform", seeds=1, **own)
    assert bits(out / "runs" / f"{label}-seed0") == bits(
        tmp_path / "all" / "runs" / "uniform-seed0"
    )
    settings = make_settings(RunSettings, {**SMALL, "sampler": label})
    assert {name: getattr(settings, name) for name in own} == own
    assert settings.part_settings()["server_momentum"] == 0.9


@pytest.mark.parametrize(
    ("samplers", "sentence"),
    [
        ("uniform+rounds=3", "unknown setting of one sampler 'rounds'"),
        ("balanced@@twin+public=2", "unknown setting of one sampler 'public'"),
        ("uniform+average=2", "average is 2; it must be in \\[0, 1\\)"),
        ("uniform+server_optimizer=adm", "unknown server optimizer 'adm': did you mean 'adam'"),
        ("uniform+sample=99", "cannot sample 99 of"),
        (
            "uniform+scaffold",
            "scaffold corrects local steps by what the estimator knows of each client",
        ),
    ],
)
def test_settings_that_a_label_cannot_have_are_refused(
    tmp_path: Path, samplers: str, sentence: str
) -> None:
    with pytest.raises(DeltaflError, match=sentence):
        compare(tmp_path / "out", samplers=samplers, seeds=1)
    assert not (tmp_path / "out").exists()


def test_more_rounds_end_in_the_bits_of_a_run_played_at_once(out: Path, tmp_path: Path) -> None:
    def stop(progress: Any) -> None:
        if progress.rounds_done:
            raise StopError

    with pytest.raises(
        StopError
    ):  # interrupted, the comparison goes on to the new number of rounds
        compare(out, stop, samplers="uniform", seeds=1, rounds=7)
    compare(out, samplers="uniform", seeds=1, rounds=7)
    compare(tmp_path / "at_once", samplers="uniform", seeds=1, rounds=7)
    assert bits(out / "runs" / "uniform-seed0") == bits(
        tmp_path / "at_once" / "runs" / "uniform-seed0"
    )


def test_a_run_with_a_suspect_end_goes_on_from_its_last_good_state(tmp_path: Path) -> None:
    wild = {**SMALL, "sampler": "uniform", "local_lr": 50.0}
    run(tmp_path / "one", **wild)
    assert "suspect" in lines_of(tmp_path / "one")[-1]
    run(tmp_path / "one", **{**wild, "rounds": 6})
    run(tmp_path / "six", **{**wild, "rounds": 6})
    assert bits(tmp_path / "one") == bits(tmp_path / "six")


def test_a_run_that_went_on_by_itself_goes_on_with_its_comparison(out: Path) -> None:
    rounds = 4
    run(out / "runs" / "uniform-seed0", **SMALL | {"rounds": rounds + 2}, sampler="uniform")
    with pytest.raises(DeltaflError, match=rf"compare --resume --rounds {rounds + 2}"):
        joined([out])
    assert compare(out, rounds=rounds + 2, samplers="uniform", seeds=1).samplers


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"rounds": 3}, "rounds = 4, not 3"),
        ({"samplers": "full", "local_lr": 0.3}, "local_lr = 0.8, not 0.3"),
        (
            {"samplers": "uniform,hics-fl", "rounds": 5},
            "hics-fl depend on the number of rounds, and it began with 4",
        ),
        (
            {"samplers": "uniform,uniform+budget=20", "rounds": 5},
            r"budget of uniform\+budget=20 is divided over the rounds, and it began with 4",
        ),
    ],
)
def test_what_does_not_only_grow_is_refused(
    out: Path, given: dict[str, object], sentence: str
) -> None:
    if "rounds" in given and given["rounds"] == 5:
        compare(out, samplers=given["samplers"], seeds=1)
    before = (out / "config.toml").read_bytes()
    with pytest.raises(DeltaflError, match=sentence):
        compare(out, **given)
    assert (out / "config.toml").read_bytes() == before


def test_an_evaluation_out_of_turn_keeps_a_run_from_going_on(tmp_path: Path) -> None:
    run(tmp_path, **SMALL, evaluate_every=3)
    with pytest.raises(DeltaflError, match="after 4 rounds, not one of every 3"):
        run(tmp_path, **{**SMALL, "rounds": 6}, evaluate_every=3)


def test_folders_are_joined_and_a_run_in_two_counts_once(
    out: Path, small: Path, tmp_path: Path
) -> None:
    run(tmp_path / "run", **SMALL, sampler="full", seed=4)
    found = joined([small, out, tmp_path / "run"])
    assert [(run.sampler, run.seed, run.metric) for run in found.curves] == [
        ("uniform", 0, "accuracy"),
        ("full", 4, "accuracy"),
    ]
    assert len(found.curves[0].draws_m) == 12


def test_folders_that_differ_are_not_joined(out: Path, small: Path, tmp_path: Path) -> None:
    compare(tmp_path / "other", samplers="uniform", seeds=1, rounds=3)
    with pytest.raises(
        DeltaflError, match=r"small\d*/out has rounds = 4 and .*other has rounds = 3"
    ):
        joined([small, tmp_path / "other"])
    place = out / "runs" / "uniform-seed0"
    note = place / "environment.json"
    note.write_text(
        note.read_text().replace(RunDirectory(place).environment()["data_crc32"], "00000000")
    )
    reseal(place)
    with pytest.raises(DeltaflError, match="other data than another run of seed 0"):
        joined([small, out])
    (place / "checkpoint.safetensors").unlink()
    with pytest.raises(
        DeltaflError, match="is not finished; go on with: deltafl compare --resume --out"
    ):
        joined([out])


def test_another_threshold_plays_nothing_again(out: Path, small: Path) -> None:
    summary = compare(out, samplers="uniform", seeds=1, threshold=0.05)
    before = bits(out / "runs" / "uniform-seed0")
    assert before == bits(small / "runs" / "uniform-seed0")
    reached = summary.samplers[0].to_threshold
    assert (summary.threshold, reached and reached.rounds and reached.rounds.mean) == (0.05, 1.0)
    assert (
        RunDirectory(out / "runs" / "uniform-seed0").environment()
        and joined([out]).numbers.threshold == 0.05
    )
    with pytest.raises(
        DeltaflError, match=r"has threshold = 0.99 and .* has threshold = 0.05: give one of them"
    ):
        joined([small, out])
    with pytest.raises(DeltaflError, match="started with stop_at_threshold = False"):
        compare(out, samplers="uniform", seeds=1, threshold=0.05, stop_at_threshold=True)


def test_runs_stop_at_the_threshold_and_have_no_gap(tmp_path: Path) -> None:
    given = {
        "samplers": "full,uniform",
        "seeds": 1,
        "threshold": 0.3,
        "stop_at_threshold": True,
        "rounds": 8,
    }
    summary = compare(tmp_path, **given)
    (full,), _ = (entry.seeds for entry in summary.samplers)
    lines = lines_of(tmp_path / "runs" / "full-seed0")
    assert full.stopped
    assert full.num_rounds == len(lines) - 1 < 8
    assert lines[-1]["stopped"] == "accuracy reached 0.3"
    assert full.final is not None
    assert full.top5 == full.final >= 0.3 > lines[-2]["test"]["accuracy"]
    assert [entry.gap_closed for entry in summary.samplers] == [None, None]
    again = compare(tmp_path, **{**given, "rounds": 9})
    assert again.samplers[0] == summary.samplers[0]
    with pytest.raises(DeltaflError, match=r"started with threshold = 0.3, not 0.4"):
        compare(tmp_path, **{**given, "rounds": 9, "threshold": 0.4})


@pytest.mark.parametrize("name", ["new", "new/below"])
def test_a_report_is_no_run_of_a_comparison(out: Path, tmp_path: Path, name: str) -> None:
    place = out / "runs" / name
    done = deltafl_here("report", "out", "--no-report", "--out", str(place), cwd=tmp_path)
    assert done.returncode == 2 and "among the runs of" in done.stderr
    assert not (out / "runs" / "new").exists()
    # A folder ``runs`` beside one's own settings is for all results.
    (tmp_path / "config.toml").write_text('task = "digits"\n')
    done = deltafl_here("report", "out", "--no-report", "--out", "runs/both", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_report_replaces_reports_alone(small: Path, tmp_path: Path) -> None:
    words = ("report", str(small), "--no-report", "--out", "joined")
    for _ in range(2):
        done = deltafl_here(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    theirs = tmp_path / "joined" / "summary.json"
    theirs.write_text('{"mine": true}')
    done = deltafl_here(*words, cwd=tmp_path)
    assert done.returncode == 2 and "would be replaced" in done.stderr
    assert theirs.read_text() == '{"mine": true}'


@pytest.mark.drawn
def test_a_report_and_a_comparison_with_a_run_that_diverged_end_with_3(
    out: Path, tmp_path: Path
) -> None:
    lines = out / "runs" / "uniform-seed0" / "rounds.jsonl"
    before, _, last = lines.read_text().rstrip().rpartition("\n")
    ended = '{"diverged": {"why": "the test loss is high", "kept": 0}, '
    lines.write_text(f"{before}\n{ended}{last[1:]}\n")
    reseal(lines.parent)
    report = deltafl_here("report", "out", "--out", "joined", cwd=tmp_path)
    assert report.returncode == 3, report.stderr
    assert "Diverged: uniform (1 of 1 seed)" in report.stdout
    assert {path.name for path in (tmp_path / "joined").iterdir()} >= {
        "summary.json",
        "accuracy.png",
    }
    grown = deltafl_here(
        "compare", "--samplers", "full", "--processes", "1", "--out", "out", cwd=tmp_path
    )
    assert (grown.returncode, "\nfull " in grown.stdout) == (3, True), grown.stderr
