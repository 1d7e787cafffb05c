"""The command line: what it offers, what it writes, and one sentence with exit code 2 for every
mistake.
"""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltafl.cli import catalogue
from deltafl.cli.main import show_log
from deltafl.errors import log
from deltafl.estimators.table import ALL_ESTIMATORS
from deltafl.samplers import SAMPLERS
from deltafl.samplers.label import parse_label
from deltafl.samplers.table import NEEDS
from deltafl.simulation import CompareSettings, RunSettings, make_settings, run_comparison
from deltafl.tasks.registry import known_tasks
from tools.cli import deltafl, deltafl_here

#: The options of the main job, which scripts rely on.
PROMISED = """
    --task --clients --sample --rounds --local-epochs --local-steps --batch-size --local-lr --server-lr
    --server-optimizer --alpha --partition --weights --threshold --data-dir --config --out --resume
"""
TINY = [
    "--task",
    "digits",
    "--clients",
    "12",
    "--sample",
    "4",
    "--rounds",
    "4",
    "--local-epochs",
    "1",
]


@pytest.mark.drawn
def test_compare_writes_summary_pictures_and_a_table(tmp_path: Path) -> None:
    options = [
        "--samplers",
        "full,fedavg,pracdelta",
        "--seeds",
        "2",
        "--threshold",
        "0.3",
        "--out",
        "out",
    ]
    done = deltafl("compare", *TINY, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(
        word in done.stdout
        for word in ("full", "fedavg", "pracdelta", "speed-up", "out/summary.json")
    )
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [entry["sampler"] for entry in summary["samplers"]] == ["full", "fedavg", "pracdelta"]
    assert summary["settings"]["rounds"] == 4
    assert f"Data: {summary['environment']['data']}" in done.stdout
    assert all(
        (tmp_path / "out" / name).stat().st_size > 5000
        for name in ("accuracy.png", "loss.png", "selections.png")
    )
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 6
    assert "out/report.html" in done.stdout
    report = re.sub("<[^>]*>", "", (tmp_path / "out" / "report.html").read_text())
    assert (
        f"Repeat it: deltafl compare {' '.join(TINY)} --threshold 0.3 --samplers "
        "full,fedavg,pracdelta"
    ) in report
    again = deltafl_here("report", "out", "--no-report", "--out", "both", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "both" / "accuracy.png").exists() and not (
        tmp_path / "both" / "report.html"
    ).exists()


def test_a_run_is_configured_by_a_file_and_says_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('task = "toy"\nsampler = "fedis@multinomial"\nrounds = 3\n')
    done = deltafl_here(
        "run", "--config", "my.toml", "--set", "proximal=0.5", "--out", "out", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "out/rounds.jsonl" in done.stdout
    data = json.loads((tmp_path / "out" / "environment.json").read_text())["data"]
    assert "toy" in data
    assert f"Data: {data}" in done.stdout
    config = (tmp_path / "out" / "config.toml").read_text()
    assert 'sampler = "fedis@multinomial"' in config
    assert "proximal = 0.5" in config


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--sampler", "pracdleta"], ["pracdleta", "'pracdelta'"]),
        (["run", "--sample", "500"], ["500", "100"]),
        (["run", "--sample", "0"], ["sample", "0"]),
        (["compare", "--threshold", "85"], ["85", "between 0 and 1"]),
        (["compare", "--samplers", "uniform,unifrom"], ["unifrom", "uniform"]),
        (["run", "--task", "fashion-mist"], ["fashion-mist", "fashion-mnist"]),
        (["run", "--task", "mnist"], ["mnist", "deltafl data fetch mnist"]),
        (["run", "--set", "proximl=1"], ["proximl", "proximal"]),
        (["run", "--set", "proximal"], ["KEY=VALUE"]),
        (
            ["run", "--rounds", "2", "--set", "rounds=3"],
            ["--set rounds=3 and --rounds set the same"],
        ),
        (["run", "--set", "nu=1", "--set", "nu=2"], ["--set nu=2 and another --set set the same"]),
        (["run", "--config", "nowhere.toml"], ["nowhere.toml"]),
        (["run", "--resume"], ["--out"]),
        (["run", "--resume", "--out", "empty"], ["no run"]),
        (["audit", "--samplers", "unifrm"], ["unifrm", "uniform"]),
        (["audit", "--samplers", "uniform,unifrm"], ["unifrm", "uniform"]),
        (["audit", "--samplers", "md,uniform+clip=median"], ["write uniform"]),
        (["audit", "--designs", "pivotl"], ["pivotl", "pivotal"]),
        (["audit", "--estimators", "hayek"], ["hayek", "hajek"]),
        (
            ["audit", "--samplers", "fedis", "--designs", "simple-random", "--task", "digits"],
            ["none of these"],
        ),
        (["data", "fetch", "fashion-mnst"], ["fashion-mnst", "fashion-mnist"]),
        (["data", "check", "mnst"], ["mnst", "mnist"]),
        (["run", "--sampler", "power-of-choice@@hajek"], ["power-of-choice", "plain-mean"]),
        (
            ["run", "--sampler", "pracdelta@simple-random"],
            ["simple-random", "pracdelta@systematic"],
        ),
        (["compare", "--samplers", ","], ["samplers is empty; write at least 1"]),
        (["run", "--partition", "natural"], ["natural", "digits"]),
        (
            ["run", "--out", "/proc/no/such"],
            ["/proc/no", "No such file", "choose a folder in which you can write"],
        ),
        (["run", "--clients", "twelve"], ["clients is 'twelve'; it must be a whole number"]),
        (
            ["compare", "--samplers", "census+average"],
            ["average has no value in 'census+average': write +average=VALUE"],
        ),
        (["samplers", "censsus"], ["'censsus'", "'census'"]),
        (["samplers", "census+average=0.5+averag=1"], ["did you mean 'average'?"]),
        (["settings", "lr"], ["did you mean 'local_lr' or 'lr_schedule' or 'server_lr'?"]),
        (["run", "--task", "toy", "--data-dir", "."], ["data_dir does nothing here"]),
        (
            ["compare", "--samplers", "uniform", "--memory-path", "."],
            ["memory_path does nothing here"],
        ),
        (["run", "--no-such-option"], ["--no-such-option"]),
    ],
)
def test_mistakes_end_in_one_sentence_and_nothing_is_written(
    tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    check_mistake(tmp_path, arguments, words)


def test_links_in_a_circle_are_no_place_for_results_and_hold_no_code(tmp_path: Path) -> None:
    for name in ("loop", "loop.py"):
        (tmp_path / name).symlink_to(name)
    for arguments in (
        ["run", *TINY, "--out", "loop"],
        ["report", "loop", "--out", "loop"],
        ["run", "--sampler", "loop.py:Mine", "--out", "loop.py"],
        ["run", "--task", "loop.py:make_task"],
    ):
        done = deltafl_here(*arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert "deltafl: " in done.stderr and "loop" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["run", "--lr", "3"],
            "(Did you mean one of: '--local-lr', '--lr-schedule', '--server-lr'?)",
        ),
        (["run", "--foo", "3"], "No such option '--foo'.\n"),
        (["comprae"], "'comprae'. Did you mean 'compare'?\n"),
        (["run", "--task", "toy", "--out", ""], "'--out': it is empty"),
        (["recommend"], "Missing option '--sizes'"),  # at a terminal it asks
    ],
)
def test_the_parser_names_what_was_meant(tmp_path: Path, arguments: list[str], words: str) -> None:
    """In the words of click's version in constraints.txt; others have their own."""
    check_mistake(tmp_path, arguments, [words])


def check_mistake(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    done = deltafl_here(
        *arguments, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"), DELTAFL_DATA=""
    )
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr
    # No half of a table before it.
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_without_its_facts_says_what_to_put_back(tmp_path: Path) -> None:
    words = ["compare", "--task", "toy", "--samplers", "uniform", "--seeds", "1", "--rounds", "1"]
    assert deltafl_here(*words, "--out", "out", cwd=tmp_path).returncode == 0
    (tmp_path / "out" / "environment.json").unlink()
    again = deltafl_here("compare", "--resume", "--out", "out", cwd=tmp_path)
    assert again.returncode == 2
    assert "environment.json is not there: put the file back" in again.stderr


EXITS = """
import sys
from dataclasses import dataclass
from deltafl import Sampler

@dataclass(frozen=True)
class Exits(Sampler):
    def init(self, population):
        {}

    def open(self, state, available_m, n, rng, oracle=None):
        sys.exit(7)
"""


@pytest.mark.parametrize("begins", ["sys.exit()", "return ()"])
@pytest.mark.parametrize("command", ["run", "compare", "tune", "plan"])
def test_a_sampler_that_exits_ends_a_command_in_a_sentence(
    command: str, begins: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(EXITS.format(begins))
    ours = {"run": ["--sampler", "mine.py:Exits"]}.get(command, ["--samplers", "mine.py:Exits"])
    sized = TINY if command != "plan" else [*TINY[:4], "--rounds", "4", "--goal", "0.5"]
    done = deltafl(command, *sized, *ours, "--quiet", "--out", "out", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"deltafl: .*mine\.py line \d+\).*\n", done.stderr)


def test_a_folder_in_use_is_not_overwritten_and_resume_must_agree(tmp_path: Path) -> None:
    first = deltafl_here("run", *TINY, "--out", "out", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    before = (tmp_path / "out" / "rounds.jsonl").read_bytes()
    again = deltafl_here("run", *TINY, "--out", "out", cwd=tmp_path)
    assert (again.returncode, "--resume" in again.stderr) == (2, True)
    other = deltafl_here("run", "--local-lr", "0.5", "--resume", "--out", "out", cwd=tmp_path)
    assert other.returncode == 2
    assert "local_lr = 0.8, not 0.5" in other.stderr
    same = deltafl_here("run", "--resume", "--out", "out", cwd=tmp_path)
    assert same.returncode == 0, same.stderr
    assert (tmp_path / "out" / "rounds.jsonl").read_bytes() == before


COMPARED = ["--samplers", "full,uniform", "--seeds", "1", "--processes", "2"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("command", "options", "record", "how", "code"),
    [
        ("run", [], "rounds.jsonl", signal.SIGINT, 130),
        ("run", [], "rounds.jsonl", signal.SIGTERM, 143),
        ("compare", COMPARED, "runs/uniform-seed0/rounds.jsonl", signal.SIGINT, 130),
    ],
)
def test_interrupted_work_ends_and_shows_how_to_go_on(
    tmp_path: Path, command: str, options: list[str], record: str, how: int, code: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "deltafl", command, *options, "--rounds", "100000", "--out", "out"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    rounds = tmp_path / "out" / record
    while not rounds.exists() or rounds.stat().st_size < 2000:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"deltafl {command} --resume --out out" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["compare"],
        ["run"],
        ["audit"],
        ["samplers"],
        ["tasks"],
        ["data", "fetch"],
        ["data", "check"],
    ],
)
def test_help_fits_the_screens_width_and_shows_an_example(
    tmp_path: Path, command: list[str]
) -> None:
    done = deltafl_here(*command, "--help", cwd=tmp_path, columns=80)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) <= 110
    assert max(map(len, lines)) <= 80
    assert "deltafl" in done.stdout.split("Options:")[0]
    if command:
        assert "Example: deltafl " + " ".join(command) in done.stdout


#: All other options of a command have a heading that says what they are for.
OTHERS = {
    "compare": "--checkpoint-every --help-all --track --set --no-report --quiet --help",
    "run": "--checkpoint-every --help-all --track --set --quiet --help",
}


def test_the_options_are_those_that_were_promised(tmp_path: Path) -> None:
    for command, own in (
        ("compare", ["--samplers", "--seeds", "--processes"]),
        ("run", ["--sampler", "--seed", "--workers"]),
    ):
        text = deltafl_here(command, "--help-all", cwd=tmp_path).stdout
        assert "[default: (" not in text
        offered = {
            word for line in text.splitlines() for word in line.split()[:1] if word.startswith("-")
        }
        assert offered >= {*PROMISED.split(), *own, "--set", "-h,"}
        assert "--precision" not in offered, "nobody has measured it"
        last = text.partition("Other options:")[2].split()
        assert {word for word in last if word.startswith("--")} == {*OTHERS[command].split()}
        screen = deltafl_here(command, "--help", cwd=tmp_path).stdout
        most = set(re.findall(r"^ +(--[\w-]+)", screen, re.MULTILINE))
        assert most < offered and len(most) <= 15 and len(screen.splitlines()) <= 40
    listed = deltafl_here("settings", cwd=tmp_path).stdout
    assert "\nprecision " in listed


def test_samplers_and_tasks_are_listed(tmp_path: Path) -> None:
    samplers = deltafl_here("samplers", cwd=tmp_path).stdout
    assert all(
        word in samplers for word in ("pracdelta", "cluster-is-oracle", "power-of-choice", "DELTA")
    )
    assert {entry.needs for entry in SAMPLERS.values()} == set(NEEDS)
    assert all(f"\n{word} " in samplers for word in NEEDS)  # each is explained
    for columns in ("80", "160"):  # needs, bias and source of each, however wide the terminal is
        lines = deltafl_here("samplers", cwd=tmp_path, COLUMNS=columns).stdout
        assert all(
            word in lines
            for word in ("oracle", "no", "Lai et al. 2021", "Jhunjhunwala et al. 2022")
        )
    assert deltafl_here("--version", cwd=tmp_path).stdout.startswith("deltafl 0.")
    tasks = deltafl_here("tasks", cwd=tmp_path).stdout
    assert all(word in tasks for word in ("fashion-mnist", "hsu2019", "synthetic"))


def test_every_setting_is_listed_with_default_range_and_meaning(tmp_path: Path) -> None:
    everything = deltafl_here("settings", cwd=tmp_path, columns=80).stdout
    for name in RunSettings.model_fields | CompareSettings.model_fields:
        assert everything.count(f"\n{name} ") + everything.startswith(name) == 2, name
    one = deltafl_here("settings", "local_momentum", cwd=tmp_path).stdout
    assert all(words in one for words in ("both", "X in [0, 1)", "0.0", "local momentum gamma"))


@pytest.mark.drawn
def test_a_comparison_without_matplotlib_leaves_the_pictures_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    settings = make_settings(
        CompareSettings, {"task": "toy", "samplers": "uniform", "seeds": 1, "rounds": 1}
    )
    with caplog.at_level("INFO", "deltafl"):
        run_comparison(settings, tmp_path, lambda _: None)
    assert (
        "no pictures: this needs the package 'matplotlib': pip install 'deltafl[plot]'"
        in caplog.text
    )
    assert (tmp_path / "summary.json").is_file()
    assert not list(tmp_path.glob("*.png"))


def test_data_check_names_what_is_missing(tmp_path: Path) -> None:
    done = deltafl_here(
        "data",
        "check",
        "mnist",
        cwd=tmp_path,
        XDG_CACHE_HOME=str(tmp_path / "cache"),
        DELTAFL_DATA="",
    )
    assert done.returncode == 1
    assert done.stdout.count("missing") == 4


def test_refused_replies_are_named(tmp_path: Path) -> None:
    done = deltafl_here(
        "run", *TINY, "--sampler", "innovation", "--local-lr", "1e30", "--out", "out", cwd=tmp_path
    )
    assert done.returncode == 3, done.stderr
    assert "12 replies were refused" in done.stderr
    assert "the first in out, round 1, client" in done.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--set", "norm_guard=3"],
            "Biased: norm_guard = 3 shortens estimates that are longer than those before.",
        ),
        (["--sampler", "oort"], "Biased: oort (estimator plain-mean)."),
        (["--sampler", "pracdelta"], None),
    ],
)
def test_a_run_says_that_it_is_biased(
    tmp_path: Path, options: list[str], sentence: str | None
) -> None:
    done = deltafl_here("run", *TINY, *options, "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "iased" in line] == (
        [sentence] if sentence else []
    )


DROPOUT_TASK = """
import numpy as np
from torch import nn
from torch.nn.functional import cross_entropy
from deltafl.tasks.base import Task
from deltafl.tasks.dataset import Dataset

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))

def make_task(seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(40, 4)).astype("float32"), rng.integers(0, 2, 40)
    return Task("own", Dataset("own", x, y, x, y, 2), list(np.split(np.arange(40), 4)), net, cross_entropy)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command",
    [
        ["run", "--sampler", "uniform"],
        ["run", "--sampler", "uniform", "--workers", "2"],
        ["compare", "--samplers", "uniform,fedavg", "--seeds", "1"],
    ],
    ids=["run", "workers", "compare"],
)
def test_the_slow_path_is_logged_once(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "own_dropout.py").write_text(DROPOUT_TASK)
    options = [
        "--task",
        "own_dropout.py",
        "--sample",
        "2",
        "--rounds",
        "1",
        "--local-steps",
        "1",
        "--out",
        "out",
    ]
    start = deltafl_here if command[-1] == "uniform" else deltafl
    done = start(*command, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("serial path") == 1
    assert "random layers (Dropout)" in done.stderr


def test_help_is_quick_because_nothing_is_loaded_for_it() -> None:
    """In a fresh process: neither the names of the package nor the commands' options load what
    only running needs.
    """
    heavy = {"numpy", "torch", "pydantic", "sklearn", "scipy", "matplotlib"}
    code = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules)); from deltafl.cli "
        "import main; main()"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "typer" in loaded
    assert heavy & {name.split(".")[0] for name in loaded} == set()


def test_one_sampler_is_shown_with_its_options(tmp_path: Path) -> None:
    shown = deltafl_here("samplers", "census", cwd=tmp_path)
    assert shown.returncode == 0
    assert all(
        word in shown.stdout
        for word in ("anticluster", "components", "[1, 128]", "made of the answers")
    )


@pytest.mark.parametrize(
    "label",
    [
        "census+mime",
        "census+mime=2",
        "uniform+scaffold",
        "uniform+local_lr=-1",
        "pracdelta+workers=2",
    ],
)
def test_the_page_of_a_label_is_refused_as_its_run_is(label: str, tmp_path: Path) -> None:
    page = deltafl_here("samplers", label, cwd=tmp_path)
    run = deltafl_here("run", "--task", "digits", "--sampler", label, cwd=tmp_path)
    assert (page.returncode, page.stderr) == (run.returncode, run.stderr)
    assert page.returncode == 2


@pytest.mark.parametrize("label", SAMPLERS)
def test_a_run_takes_every_method_of_the_table(label: str) -> None:
    """Also those that need labels, losses or public examples, which a task may have."""
    catalogue.require_label(parse_label(label))


def test_a_label_is_described_with_its_own_parts_and_settings(tmp_path: Path) -> None:
    shown = " ".join(
        deltafl_here(
            "samplers", "delta@poisson@difference+average=0.5", cwd=tmp_path
        ).stdout.split()
    )
    parts = (
        "sampler delta",
        "design poisson",
        "estimator difference",
        "unbiased if R > 0",
        "average both X in [0, 1)",
    )
    assert [part for part in parts if part not in shown] == []
    failed = deltafl_here("samplers", "census(comp=1)+average=0.5", cwd=tmp_path)
    assert failed.returncode == 2
    assert "unknown option 'comp' of 'census'" in failed.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "anticluster",
            ("groups whose sums of x_i / pi_i are alike", "exact yes", "SAMPLER@anticluster"),
        ),
        (
            "innovation-damped",
            ("beta c_i", "Here: c_i = the last", "unbiased yes", "SAMPLER@@innovation-damped"),
        ),
    ],
)
def test_a_design_and_an_estimator_are_described(
    tmp_path: Path, name: str, words: tuple[str, ...]
) -> None:
    shown = deltafl_here("samplers", name, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert [word for word in words if word not in " ".join(shown.stdout.split())] == []


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_every_sampler_is_described_under_its_name_with_all_options(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Also one that shares its name with an estimator, which is described below it."""
    catalogue.samplers(name)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["sampler", name]
    assert any(line.split()[:2] == ["estimator", name] for line in lines) == (
        name in ALL_ESTIMATORS
    )
    entry = SAMPLERS[name]
    meanings = catalogue._meanings(entry.kind)
    assert [option for option in entry.options if not meanings.get(option)] == []


def test_files_that_a_comparison_did_not_write_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "summary.json").write_text("mine")
    done = deltafl_here("compare", "--task", "toy", "--rounds", "2", "--out", "mine", cwd=tmp_path)
    assert (done.returncode, "mine/summary.json would be replaced" in done.stderr) == (2, True)
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["summary.json"]


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_lists_keep_names_and_numbers_whole_where_the_terminal_is_narrow(columns: int) -> None:
    """Of samplers and tasks; what there is no place for is named."""
    for command, names in (("samplers", SAMPLERS), ("tasks", known_tasks())):
        done = deltafl_here(command, cwd=Path.cwd(), columns=columns)
        first = {line.split()[0] for line in done.stdout.splitlines() if line.split()}
        assert names.keys() <= first
        assert "…" not in done.stdout
    assert all(str(spec.rounds) in done.stdout or columns == 40 for spec in known_tasks().values())
    assert bool(re.search("Too narrow for: .*rounds", done.stdout)) == (columns == 40)


def test_a_script_gets_nothing_but_the_folder(tmp_path: Path) -> None:
    small = ("--task", "toy", "--rounds", "2", "--quiet", "--out")
    for command in (("compare", "--samplers", "full,uniform", "--seeds", "1"), ("run",)):
        done = deltafl_here(*command, *small, f"{command[0]}[/x]", cwd=tmp_path)
        assert (done.stdout, done.stderr, done.returncode) == (f"{command[0]}[/x]\n", "", 0)


def test_the_command_alone_says_where_to_begin(tmp_path: Path) -> None:
    done = deltafl_here(cwd=tmp_path)
    assert done.returncode == 0 and len(done.stdout.splitlines()) <= 12
    assert "deltafl compare" in done.stdout and "deltafl --help" in done.stdout


def test_commands_of_one_process_say_each_text_once(capsys: pytest.CaptureFixture[str]) -> None:
    """As in a notebook that calls them."""
    for _ in range(3):
        show_log()
    log.info("a note")
    assert capsys.readouterr().err.count("a note") == 1
