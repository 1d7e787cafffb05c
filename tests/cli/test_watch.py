"""``deltafl watch``: it says what the records say, only reads, ends with the run, and answers what is
no record with a sentence.
"""

import json
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import deltafl as dl
from deltafl.simulation import RunDirectory, RunSettings, make_settings, run_single
from deltafl.simulation.view.live import _remarks, page, picture
from deltafl.simulation.view.seen import Seen, state_at
from tools.cli import deltafl_here
from tools.names import NAMES, is_plain
from tools.serving import serve
from tools.simulation import TINY, StopError, lines_of, quiet, stop_after
from tools.terminal import read_terminal


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted in its fourth round, whose last line is half written."""
    folder = tmp_path_factory.mktemp("watched") / "run"
    settings = make_settings(RunSettings, {**TINY, "sampler": "pracdelta", "checkpoint_every": 2})
    with pytest.raises(StopError):
        run_single(settings, folder, stop_after(4))
    with (folder / "rounds.jsonl").open("ab") as file:
        file.write(b'{"round": 5, "coh')
    return folder


def facts(place: Path) -> dict[str, str]:
    return {row[0]: row[1] for row in picture(place).rows}


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(file): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_it_says_what_the_records_say_and_only_reads(played: Path) -> None:
    before = content(played.parent)
    done = deltafl_here("watch", str(played), "--once", cwd=played.parent)
    assert done.returncode == 0, done.stderr
    assert content(played.parent) == before
    found = facts(played)
    whole = (played / "rounds.jsonl").read_text().splitlines()[:-1]
    lines = [json.loads(line) for line in whole]
    last = lines[-1]
    assert found["round"] == "4 of 6" and "4 of 6" in done.stdout
    assert found["test accuracy"].startswith(f"{last['test']['accuracy']:.2%}")
    assert found["largest weight"] == f"{last['largest_weight']:.3g}"
    assert found["effective sample size"] == f"{last['effective_sample_size']:.3g} of 4"
    error = last["variance"] ** 0.5 / last["estimate_norm"]
    assert found["error of the estimate"] == f"{error:.0%} of its length"
    asked = [client for line in lines[1:] for client in line["cohort"]]
    assert found["never selected"] == f"{12 - len(set(asked))} of 12 clients"
    assert found["cost so far"].startswith(f"{len(asked)} trainings, ")
    assert found["response rate"] == found["availability"] == "100%"


def test_a_comparison_is_over_when_all_of_its_runs_are(tmp_path: Path) -> None:
    given: dict[str, Any] = {key: value for key, value in TINY.items() if key != "task"}
    dl.compare(
        "digits",
        "uniform,full",
        seeds=1,
        out=tmp_path,
        progress=False,
        report=False,
        processes=1,
        callbacks=[lambda lines: "enough" if len(lines) > 2 else None],
        **given,
    )
    shown = picture(tmp_path)
    assert shown.is_over and [row[0] for row in shown.rows] == ["full-seed0", "uniform-seed0"]
    assert "uniform-seed0: Stopped in round 2: enough." in shown.remarks
    (tmp_path / "runs" / "full-seed0" / "rounds.jsonl").unlink()
    assert not picture(tmp_path).is_over
    # A damaged run does not hide the others, whatever is damaged.
    damaged = tmp_path / "runs" / "uniform-seed0"
    for name in ("config.toml", "rounds.jsonl", "checkpoint.safetensors"):
        (damaged / name).write_bytes(b"[[[[\n")
        shown = picture(tmp_path)
        assert not shown.is_over and [row[0] for row in shown.rows] == [
            "full-seed0",
            "uniform-seed0",
        ]
        assert any(text.startswith("uniform-seed0: Cannot be read: ") for text in shown.remarks)


@pytest.mark.parametrize("name", ["state", "state/federation.safetensors"])
def test_a_federation_is_seen_by_its_saved_state(tmp_path: Path, name: str) -> None:
    serve(tmp_path, "innovation@pivotal")
    assert state_at(tmp_path / "state" / "federation.safetensors").method == "innovation@pivotal"
    found = facts(tmp_path / name)
    assert found["round"] == "4" and found["response rate"] == "100%"
    assert found["cost so far"] == "8 trainings"
    assert found["clients' loss"].startswith("1")
    assert found["largest weight"] != "unknown"
    text = (tmp_path / "state" / "rounds.jsonl").read_text()
    assert "client:" not in text
    assert (tmp_path / "state" / "rounds.jsonl").stat().st_mode & 0o77 == 0
    assert not picture(tmp_path / name).is_over


def test_a_round_that_was_written_twice_counts_once(tmp_path: Path) -> None:
    """As of a server that was killed between its line and its state, or went back."""
    serve(tmp_path, "uniform")
    log = tmp_path / "state" / "rounds.jsonl"
    first, *_, last = log.read_text().splitlines()
    later = json.dumps({**json.loads(last), "round": 9, "largest_weight": 0.99})
    again = json.dumps({**json.loads(last), "largest_weight": 0.123})
    log.write_text("\n".join([first, later, last, again, ""]))
    found = facts(tmp_path / "state")
    assert (found["round"], found["largest weight"]) == ("4", "0.123")


def test_in_a_terminal_it_follows_a_run_of_another_process_to_its_end(tmp_path: Path) -> None:
    settings = make_settings(RunSettings, {**TINY, "sampler": "uniform"})
    with pytest.raises(StopError):
        run_single(settings, tmp_path / "run", stop_after(2))
    html = tmp_path / "page.html"
    ours, theirs = pty.openpty()
    watching = subprocess.Popen(
        [sys.executable, "-m", "deltafl", "watch", "run", "--every", "0.1", "--html", html.name],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "80", "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    timer = threading.Timer(60, watching.kill)
    timer.start()

    def wait_until_seen(round: int) -> None:
        while not (html.exists() and f"{round} of 6" in html.read_text()):
            assert watching.poll() is None

    wait_until_seen(2)
    # The watcher sees each round before the next one is played.
    run_single(settings, tmp_path / "run", lambda done: wait_until_seen(done.round))
    text = read_terminal(ours)
    assert watching.wait() == 0
    timer.cancel()
    assert re.findall(r"(\d) of 6 ", text)[0] == "2"
    assert {"2", "4", "5", "6"} <= set(re.findall(r"(\d) of 6 ", text))
    assert "Finished: 6 rounds are played." in text
    assert "refresh" not in html.read_text()


def test_ctrl_c_ends_the_watching_alone(tmp_path: Path, played: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "deltafl", "watch", str(played), "--html", "page.html"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(60, process.kill)
    timer.start()
    while not (tmp_path / "page.html").exists():
        assert process.poll() is None
    threading.Event().wait(0.5)
    process.terminate()
    _, error = process.communicate()
    timer.cancel()
    assert "what was watched goes on" in error and "Traceback" not in error


def line(**given: Any) -> dict[str, Any]:
    known = {"round": 9, "num_selected": 6, "effective_sample_size": 5.0, "largest_weight": 0.2}
    return {**known, "rejected": [], **given}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"largest_weight": 0.51}, "depends on one client: its weight is 0.51"),
        ({"effective_sample_size": 1.9}, "6 count like 1.9"),
        ({"rejected": [[c, "bad"] for c in range(6)]}, "All replies of round 9 were refused"),
        ({"stopped": "enough"}, "Stopped in round 9: enough."),
        ({"diverged": {"why": "loss", "kept": 4}}, "Diverged in round 9: loss."),
        ({"largest_weight": 0.5, "effective_sample_size": 2.0}, ""),
        ({"largest_weight": 1.0, "effective_sample_size": 1.0, "num_selected": 1}, ""),
        ({"largest_weight": None, "effective_sample_size": None}, ""),
    ],
)
def test_it_warns_in_words(given: dict[str, Any], sentence: str) -> None:
    remarks = list(_remarks(Seen("x", [line(**given)], None, {}, None)))
    assert len(remarks) == bool(sentence)
    assert sentence in "".join(remarks)


def test_it_warns_of_clients_that_are_never_there(tmp_path: Path) -> None:
    settings = make_settings(
        RunSettings, {**TINY, "sampler": "uniform", "availability": "always", "dropout": 0.7}
    )
    run_single(settings, tmp_path / "run", quiet)
    remarks = " ".join(picture(tmp_path / "run").remarks)
    assert re.search(r"Only \d+% of the selected clients have replied", remarks)
    counts = RunDirectory(tmp_path / "run").saved()
    assert counts is not None
    arrays = {**counts[1], "state.missed_m": counts[1]["state.missed_m"].copy()}
    arrays["state.missed_m"][:2] = 6
    seen = Seen("x", lines_of(tmp_path / "run"), 6, arrays, None)
    assert any(text.startswith("2 of 12 clients were never there") for text in _remarks(seen))
    # A stratum is named if all of its clients are away, and its name is no markup or code.
    for strata, named in (
        (["[/x]\n"] * 2 + ["south"] * 10, [repr("[/x]\n")]),
        (["north"] * 3 + ["south"] * 9, []),
        (["north"] * 2, []),
    ):
        found = [text for text in _remarks(seen._replace(strata=strata)) if "stratum" in text]
        assert [text.split()[3] for text in found] == named


BAD: dict[str, dict[str, bytes]] = {
    "nothing": {},
    "no record": {"notes.txt": b"x"},
    "no toml": {"config.toml": b"\xff"},
    "other types": {"config.toml": b'rounds = "many"'},
    "no numbers": {"config.toml": b'sampler = "x"', "rounds.jsonl": b'{"round": "x"}\n'},
    "no lines": {"config.toml": b'sampler = "x"', "rounds.jsonl": b"[[[[\n"},
    "huge": {"config.toml": b'sampler = "x"', "rounds.jsonl": b'{"round": 1, "loss": 1e999}\n'},
    "a state": {"federation.safetensors": b"\x10" + bytes(40)},
    "a checkpoint": {"config.toml": b'sampler = "x"', "checkpoint.safetensors": b"x" * 99},
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_record_is_a_sentence(tmp_path: Path, name: str) -> None:
    for file, data in BAD[name].items():
        (tmp_path / file).write_bytes(data)
    done = deltafl_here("watch", str(tmp_path), "--once", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("deltafl: ") and done.stderr.count("\n") == 1


def test_no_folder_and_no_time_are_sentences(tmp_path: Path) -> None:
    for words in (["nowhere", "--once"], ["nowhere", "--every", "nan"], ["x", "--every", "0"]):
        done = deltafl_here("watch", *words, cwd=tmp_path)
        assert done.returncode == 2 and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["rounds.jsonl", "checkpoint.safetensors", "config.toml", "new"])
def test_a_page_takes_the_place_of_no_record(played: Path, name: str) -> None:
    before = content(played)
    done = deltafl_here("watch", ".", "--once", "--html", name, cwd=played)
    assert done.returncode == 2 and "must end in .html" in done.stderr
    assert content(played) == before


@pytest.mark.parametrize("name", NAMES[::6])
def test_text_of_others_is_text(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.toml").write_text(f"sampler = {json.dumps(name)}\nrounds = 2")
    lines = [
        {"round": 0, "test": {name: 1.0, "loss": 2.0}, "metrics": [{"name": name}]},
        {**line(), "rejected": [[0, name]], "stopped": name, "test": {name: 2.0, "loss": 1.0}},
    ]
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    done = deltafl_here("watch", str(tmp_path), "--once", "--html", "p.html", cwd=tmp_path)
    assert done.returncode in (0, 2) and is_plain(done.stdout + done.stderr)
    if done.returncode == 0:
        html = (tmp_path / "p.html").read_text()
        assert is_plain(html) and "<script" not in html and "<b id" not in html


def test_a_page_loads_itself_again_until_all_is_over(played: Path) -> None:
    shown = picture(played)
    assert '<meta http-equiv="refresh" content="3">' in page(shown, 3)
    assert "refresh" not in page(shown._replace(is_over=True), 3)
