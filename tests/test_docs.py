"""The examples in documents run, and the documents name the files that are there."""

import csv
import doctest
import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from sklearn.datasets import load_iris
from typer.testing import CliRunner

import deltafl
from deltafl import (
    Census,
    Comparison,
    Plan,
    Population,
    Reports,
    Sampler,
    close_round,
    init_round,
    make_plan,
    make_sampler,
    open_round,
)
from deltafl.analysis import recommend
from deltafl.audit import check_sampler
from deltafl.cli.main import app
from deltafl.designs.table import DESIGNS
from deltafl.estimators.table import ESTIMATORS
from deltafl.samplers import SAMPLERS, is_unbiased
from reproduction.benchmark.judge import needs
from reproduction.spec import load_experiment

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").rglob("*.md")]
#: Pages whose blocks build on each other.
PLAYED = (
    "tutorial/own-data.md",
    *(
        f"how-to/{name}.md"
        for name in (
            "cluster",
            "cohort-size",
            "costs-of-clients",
            "huggingface",
            "local-parts",
            "metrics",
            "models",
            "own-metric",
            "own-partition",
            "pretrained",
            "python",
            "pytorch-data",
            "strata",
            "tables",
            "tokens",
            "track",
        )
    ),
)
COMPARE = deltafl.compare
#: Notes.
EXEMPT = ("lab-notes.md",)
#: Commands that are not played, by how they begin, and why.
NOT_PLAYED = {
    "pip ": "needs the network; 'make dist-check' installs the package with each extra",
    "unzip ": "reads what pip downloads",
    "make test": "is what plays this file",
    "deltafl data fetch": "needs the network",
    "deltafl audit --samplers by-loss-rank": "needs a change of the library; see the test of classes",
    "deltafl plan --task digits --clients 20": "takes a minute; tests/cli/test_plan.py",
    "deltafl compare --task fashion-mnist --device cuda": "needs a GPU",
    "deltafl compare --executor slurm": "needs a cluster; tests/simulation/test_elsewhere.py",
    "deltafl compare --executor dask": "needs a scheduler; tests/simulation/test_elsewhere.py",
    "torchrun --nproc-per-node gpu": "needs GPUs",
    "torchrun --nnodes": "needs two machines",
    "ssh-keygen": "needs servers",
    "flower-supernode": "needs servers",
    "flower-superlink": "needs servers",
    "flwr supernode": "needs servers",
    "flwr run": "starts engines; tests/flower/test_engines.py is slow, too",
    "cd examples/nvflare_quickstart": "starts sites; tests/hosts/test_same_answer.py is slow, too",
    "export ": "sets variables for servers",
    "mlflow ui": "does not end",
    "tensorboard ": "does not end",
    "python examples/": "tests/test_examples.py",
    "python -m pytest": "is what plays this file",
    "python -m reproduction": "takes hours; tests/reproduction",
    "python benchmarks/server_scale.py": "measures this machine for minutes",
    "python benchmarks/flower_many.py": "measures this machine for minutes",
    "python benchmarks/attacked.py": "starts servers and nodes, for half an hour",
    "python benchmarks/kills.py": "kills and resumes sixty comparisons",
    "deltafl plan --task digits": "plays for a minute; tests/cli/test_plan.py",
    "deltafl watch my-run --once --plan": "needs that plan; tests/cli/test_plan.py",
}
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in EXEMPT),
]


class Command(NamedTuple):
    """A line that a page tells to type in a shell, and what the page shows below it."""

    line: str
    shown: str = ""

    @property
    def why_not(self) -> str | None:
        """Why it is not played, if it is not."""
        return next((why for start, why in NOT_PLAYED.items() if self.line.startswith(start)), None)

    def play(self, number: int) -> None:
        """With one seed and round, if the page does not show what it prints. Digits stand for
        FashionMNIST, which would be downloaded.
        """
        program, *words = shlex.split(self.line)
        if self.shown:
            same_text(self.shown, play(program, words))
            return
        words = ["digits" if word == "fashion-mnist" else word for word in words]
        if words[0] in ("compare", "tune"):
            words += ["--rounds", "1", "--seeds", "1", "--processes", "1"]
        if words[0] == "tune":
            words += ["--local-rates", "0.8"]
        if words[0] == "run":
            words += ["--rounds", "1"]
        if words[0] in ("compare", "run") and "--out" not in words:
            words += ["--out", f"out-{number}"]
        play(program, words)


def commands_of(page: Path) -> list[Command]:
    """All of its blocks for a shell."""
    found = []
    blocks = r"^ *```(sh|bash|console)\n(.*?)^ *```"
    for kind, block in re.findall(blocks, page.read_text(), re.DOTALL | re.MULTILINE):
        if kind == "console":
            sessions = re.findall(
                r"^\$ ((?:[^\n]*\\\n)*[^\n]*)\n((?:(?!\$ )[^\n]*\n)*)", block, re.MULTILINE
            )
        else:
            lines = re.sub(r"\\\n", "", block).splitlines()
            sessions = [(line.partition("  #")[0].strip(), "") for line in lines if line.strip()]
        found += [Command(re.sub(r"\\\n", "", line), shown) for line, shown in sessions]
    return found


def play_commands(page: Path) -> None:
    """Those that can be played."""
    for number, command in enumerate(commands_of(page)):
        if command.why_not is None and are_installed(command.line):
            command.play(number)


#: Pages that play for long; ``make thorough`` plays them.
LONG = {
    "how-to/cluster.md",
    "how-to/cohort-size.md",
    "how-to/local-parts.md",
    "how-to/metrics.md",
    "how-to/track.md",
    "docs/how-to/distributed.md",
    "docs/how-to/first-round.md",
    "docs/how-to/plan.md",
    "docs/how-to/rates.md",
    "docs/why/theory/auxiliary.md",
    "docs/why/theory/census.md",
    "docs/why/theory/feddelta.md",
    "docs/why/theory/table-1.md",
}


#: Pages that readers begin with: their comparisons draw pictures.
DRAWN = {"README.md", "tutorial/own-data.md"}


def cases(documents: Iterable[str]) -> list[Any]:
    """Documents as parameters of a test."""
    return [
        pytest.param(
            document,
            marks=[
                *[pytest.mark.thorough] * (document in LONG),
                *[pytest.mark.drawn] * (document in DRAWN),
            ],
        )
        for document in documents
    ]


WITH_SESSIONS = [
    page.relative_to(ROOT).as_posix()
    for page in PAGES
    if page.relative_to(ROOT).as_posix().removeprefix("docs/") not in PLAYED
    and (
        "```pycon\n" in page.read_text()
        or any(command.why_not is None for command in commands_of(page))
    )
]


def test_what_is_not_played_is_on_a_page() -> None:
    lines = [command.line for page in PAGES for command in commands_of(page)]
    assert len(lines) > 40
    for start in NOT_PLAYED:
        assert any(line.startswith(start) for line in lines), start
    played = (ROOT / "tests" / "test_examples.py").read_text()
    for line in lines:
        if line.startswith("python examples/"):
            assert line.removeprefix("python examples/") in played, line


@pytest.mark.parametrize(("document", "last_round"), [("your-loop.md", 99), ("scale.md", 2)])
def test_the_loop_in_numpy_of_a_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: str, last_round: int
) -> None:
    text = (ROOT / "docs" / "how-to" / document).read_text()
    block = next(
        code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "np.zeros" in code
    )
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"local_update": lambda client, params_d: 0.1 * (client - params_d)}
    exec(compile(block, document, "exec"), names)
    assert np.isfinite(names["state"].params_d).all()
    assert names["info"].round == last_round


@pytest.mark.parametrize("document", cases(WITH_SESSIONS))
def test_sessions_print_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: str
) -> None:
    """Python after ``>>>``, in one session a page, then commands, in one folder; a line of dots
    stands for any lines, and rounding errors are equal.
    """
    page = (ROOT / document).read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("results", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_flowers(tmp_path / "table.csv")
    for title, code in re.findall(r"```python title=(\S+)\n(.*?)```", page, re.DOTALL):
        Path(title).write_text(code)
    python = "\n".join(re.findall(r"```pycon\n(.*?)```", page, re.DOTALL))
    session = doctest.DocTestParser().get_doctest(python, {}, document, document, 0)
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(session).failed == 0
    play_commands(ROOT / document)


def write_flowers(table: Path) -> None:
    """Three species of iris, for commands on a table of the reader's own."""
    x, y = load_iris(return_X_y=True)
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "c", "d", "species"])
        writer.writerows([*row, f"species {label}"] for row, label in zip(x, y, strict=True))


def test_the_torch_loop_of_the_page_learns_what_its_clients_know(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch = pytest.importorskip("torch")
    text = (ROOT / "docs" / "how-to" / "your-loop.md").read_text()
    block = text.partition("```python\n")[2].partition("```")[0]
    assert len([line for line in block.splitlines() if line.strip()]) <= 23
    change = text.partition("```diff\n")[2].partition("```")[0].splitlines()
    assert "".join(line[1:] + "\n" for line in change if line[0] != "-") in block
    assert (
        "three lines change and four are new" in text
        and sum(line[0] == "-" for line in change) == 3
    )
    assert sum(line[0] == "+" for line in change) == 7
    names: dict[str, Any] = {}
    exec(compile(block, "docs/how-to/your-loop.md", "exec"), names)
    assert isinstance(names["model"], torch.nn.Linear)
    printed = capsys.readouterr().out
    assert names["hits"].float().mean() > 0.8 and f"```text\n{printed}```" in text
    _, auxiliary, losses, joined, _ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(joined, "docs/how-to/your-loop.md", "exec"), names)
    assert open_round(names["plan"], names["state"]).round == 30
    exec(compile(auxiliary, "docs/how-to/your-loop.md", "exec"), names)
    names["state"] = init_round(names["plan"], names["model"])
    assert open_round(names["plan"], names["state"]).client_n.shape == (5,)
    for label in ("oort", "active-fl"):
        names["plan"] = make_plan(label, [20] * 20, n=5)
        names["state"] = init_round(names["plan"], names["model"])
        names["cohort"] = open_round(names["plan"], names["state"])
        exec(compile(losses, "docs/how-to/your-loop.md", "exec"), names)
        assert names["info"].num_responded == 5


def test_the_page_about_the_census_does_what_it_says() -> None:
    page = (ROOT / "docs" / "why" / "census.md").read_text()
    rng = np.random.default_rng(0)
    sizes = np.full(40, 10)
    target_md = np.tile(np.eye(4)[np.arange(40) % 4], 3) + 0.05 * rng.normal(size=(40, 12))
    names: dict[str, Any] = {"sizes": sizes, "params_d": np.zeros(12)}
    names["train"] = lambda client, params_d: 0.5 * (target_md[client] - params_d)
    block = page.partition("```python\n")[2].partition("```")[0]
    exec(compile(block, "docs/why/census.md", "exec"), names)
    assert names["info"].round == 29
    np.testing.assert_allclose(
        names["state"].params_d, target_md.mean(axis=0), atol=0.04
    )  # uniform: 0.08 to 0.23
    private = (ROOT / "docs" / "why" / "census-privacy.md").read_text()
    rows = re.findall(
        r"^\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", private, re.MULTILINE
    )
    assert len(rows) == 5
    for noise, *shown in rows:
        square = float(noise) ** 2
        left = [f"{part / (part + square):.2f}" for part in (0.5, 0.1)]
        assert shown == [f"{Census(noise=float(noise)).epsilon(1e-5):.1f}", *left]


@pytest.mark.parametrize("document", cases(PLAYED))
def test_the_blocks_of_a_page_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    document: str,
) -> None:
    """Python, then commands, in one folder. What a block shows below it or in comments is what it
    prints; a comparison that shows nothing is short.
    """
    page = (ROOT / "docs" / document).read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.syspath_prepend(tmp_path)  # as for a script there
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    names: dict[str, Any] = {}
    blocks = r"```python(?: title=([^\n]*))?\n(.*?)```\n(?:\n```text\n(.*?)```)?"
    for title, code, shown in re.findall(blocks, page, re.DOTALL):
        if title:
            Path(title).write_text(code)
        elif not is_of_another_test(code) and are_installed(code):
            with monkeypatch.context() as patch:
                if not shown:
                    patch.setattr(deltafl, "compare", compare_shortly)
                capsys.readouterr()
                exec(compile(code, document, "exec"), names)
            said = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
            if shown or said:
                same_text(shown or "\n".join(said) + "\n", capsys.readouterr().out)
    play_commands(ROOT / "docs" / document)


def is_of_another_test(code: str) -> bool:
    """The page on models averages buffers, which a test of its own checks."""
    return "coef_n" in code


def are_installed(code: str) -> bool:
    """The packages of extras that a block needs."""
    return all(
        importlib.util.find_spec(name) is not None
        for name in ("datasets", "distributed", "mlflow", "tensorboard", "trackio", "wandb")
        if name in code
    )


def compare_shortly(task: Any, samplers: Any, **options: Any) -> Comparison:
    """With one seed and round."""
    return COMPARE(task, samplers, **{**options, "seeds": 1, "rounds": 1, "processes": 1})


def play(program: str, words: list[str]) -> str:
    """What it prints, without progress."""
    if program == "deltafl":
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        return done.stdout
    if program == "torchrun":
        words = ["-m", "torch.distributed.run", *words]
    else:
        assert program == "python"
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def same_text(shown: str, printed: str) -> None:
    """A line of dots stands for any lines; blanks at the end of a line do not count."""
    got = "\n".join(line.rstrip() for line in printed.splitlines()) + "\n"
    want, got = (re.sub(r"\d\.\de-1[4-9]", "0.0e-16", text) for text in (shown, got))
    assert doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS), got


def test_the_page_about_own_methods_has_files_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, control, states = (
        (ROOT / "docs" / page).read_text()
        for page in (
            "how-to/add-a-method.md",
            "how-to/add-a-control-variate.md",
            "reference/own-samplers.md",
        )
    )
    page = sampler + control
    monkeypatch.chdir(tmp_path)
    for title, code in re.findall(r"```python title=(\S+)\n(.*?)```", page, re.DOTALL):
        Path(title).write_text(code)
    check_sampler(make_sampler(f"{tmp_path}/mine.py:ByLoss(power=2)"))
    stated = set(re.findall(r"^\| `(\w+) = ", states, re.MULTILINE))
    public = {
        name
        for name in vars(Sampler)
        if name[0] != "_" and not inspect.isfunction(getattr(Sampler, name))
    }
    assert stated == public | {"ranges"}
    assert re.findall(r"^\| `(\w+_n\w?)` ", states, re.MULTILINE) == list(Reports._fields)


def test_classes_for_the_library_do_what_the_page_says() -> None:
    page = (ROOT / "docs" / "how-to" / "add-to-the-library.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    made: dict[str, Any] = {}
    for package, block in zip(("samplers", "server"), blocks, strict=True):
        made |= {"__name__": f"deltafl.{package}.table", "__package__": f"deltafl.{package}"}
        exec(compile(block, page, "exec"), made)
    check_sampler(made["ByLossRank"]())
    plan = Plan(Population.from_sizes([1, 1]), made["ByLossRank"](), 2, parts=(made["Sign"](0.5),))
    state = init_round(plan, np.zeros(2))
    reports = Reports.make(2, loss=[1.0, 2.0])
    update_nd = np.array([[1.0, -3.0], [2.0, -1.0]])
    state, _ = close_round(plan, state, open_round(plan, state), update_nd, reports)
    np.testing.assert_array_equal(state.params_d, [0.5, -0.5])


def test_what_is_cited_is_among_the_references() -> None:
    """Each short form of a source, and no reference that nothing cites."""
    text = "".join(
        page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("references*.md"))
    )
    known = set(re.findall(r"^\| ([A-Z][^|]+ \d{4}) \|", text, re.MULTILINE))
    sources = {entry.source for entry in SAMPLERS.values()} | {
        design.source for design in DESIGNS.values()
    }
    sources |= {estimator.source for estimator in ESTIMATORS.values()}
    cited = {
        re.sub(r" \(.*\)", "", part)
        for source in sources
        for part in re.split(r"; |, after ", source)
    }
    assert cited - {"", "-", "this project"} == known


def test_the_architecture_names_every_file_and_folder() -> None:
    text = (ROOT / "docs" / "reference" / "architecture.md").read_text()
    for path in (ROOT / "src" / "deltafl").iterdir():
        if path.suffix == ".py" and not path.name.startswith("__"):
            assert path.name in text, f"docs/reference/architecture.md does not name {path.name}"
        elif path.is_dir() and not path.name.startswith("__"):
            assert f"{path.name}/" in text, (
                f"docs/reference/architecture.md does not name {path.name}/"
            )


def test_the_readmes_lines_of_python_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None and "seeds=5" in block[1]
    monkeypatch.chdir(tmp_path)
    exec(block[1].replace("seeds=5", "seeds=1, rounds=2"), {})
    assert (tmp_path / "figure.pdf").stat().st_size > 1000


def test_the_readmes_change_is_that_of_the_example() -> None:
    change = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert change is not None
    folder = ROOT / "examples" / "flower_from_fedavg"
    for sign, name in (("-", "fedavg_app.py"), ("+", "deltafl_app.py")):
        lines = [line[1:] for line in change[1].splitlines() if line[0] == sign]
        assert set(lines) <= {*(folder / name).read_text().splitlines()}


#: Where a row of the README's table of gaps was measured, by its first word.
README_PARTS = {
    "digits": ("benchmark", "digits"),
    "MNIST": ("benchmark", "mnist-dirichlet"),
    "FashionMNIST": ("benchmark", "fashion-mnist"),
    "handwriting": ("registered", "unipen62"),
    "Shakespeare": ("registered", "shakespeare"),
    "faces": ("registered", "celeba"),
    "CIFAR-10": ("registered", "cifar10"),
}


def like_rows(folder: str) -> list[dict[str, str]]:
    """Methods that were given the same; one that stands in two groups has its last row."""
    with (ROOT / "results" / folder / "like.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_readme_fits_on_a_screen_and_says_what_the_benchmark_found() -> None:
    text = (ROOT / "README.md").read_text()
    lines = [line for line in text.splitlines() if line[:1] != "|" and line[:2] != "!["]
    assert len(lines) <= 60
    measured = {
        (folder, row["part"], row["method"]): row
        for folder in ("benchmark", "registered")
        for row in like_rows(folder)
    }
    shown = re.findall(
        r"^\| ([\w-]+).*?\| `(\+[^`]*)` \| ([^|]*\|[^|]*\|[^|]*) \|", text, re.MULTILINE
    )
    assert len(shown) == len(README_PARTS)
    for title, settings, gaps in shown:
        row = measured[*README_PARTS[title], f"census{settings}"]
        assert gaps.split(" | ") == [interval(row, name) for name in ("g", "c", "g_b")], title


def test_the_table_of_evidence_is_that_of_the_benchmark() -> None:
    experiment = load_experiment("benchmark")
    parts = {str(table["title"]): part for part, table in experiment.parts.items()}
    with (ROOT / "results" / "benchmark" / "table.csv").open(encoding="utf-8") as file:
        measured = {(row["method"], row["part"]): interval(row) for row in csv.DictReader(file)}
    lines = [
        line.strip("| ").split(" | ")
        for line in (ROOT / "docs" / "why" / "evidence.md").read_text().splitlines()
        if line[:1] == "|"
    ]
    head, _, *rows = lines
    assert {"`pracdelta`", "`fedentopt` †", "`fed-cbs` †"} < {row[0] for row in rows}
    assert len(head) > 4
    for first, needed, *shown in rows:
        _, label, marks = first.split("`", 2)
        assert ("†" in marks) == (not is_unbiased(label))
        assert ("labels" in needed) == (needs(label) == "known")
        for title, cell in zip(head[2:], shown, strict=True):
            recommended = experiment.parts[parts[title]].get(
                "recommended", experiment.view.recommended
            )
            at_end = {"full": "1", "uniform": "0"}.get(label)
            assert cell == (
                at_end or measured[recommended if "recommended" in marks else label, parts[title]]
            ), first
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "how-to" / "which-sampler.md").read_text())
    quoted = list(re.finditer(r"(-?\d\.\d\d \[[^]]*\]) on (\w+)", page))
    assert len(quoted) == len(re.findall(r"\d\.\d\d \[", page)) >= 12
    parts |= {"MNIST": parts["MNIST, 300 clients"]}
    for found in quoted:  # of the label before it
        label = re.findall(r"`([a-z][\w@+=.-]*)`", page[: found.start()])[-1]
        assert measured[label, parts[found[2]]] == found[1], label


def test_the_readmes_output_is_that_of_the_demo() -> None:
    summary = json.loads((ROOT / "results" / "demo" / "summary.json").read_text())
    shown = (ROOT / "README.md").read_text().partition("```\n  ")[2].partition("```")[0]
    rows = dict(line.split(maxsplit=1) for line in shown.splitlines() if "±" in line)
    assert len(rows) == 4
    for each in summary["samplers"]:
        if each["sampler"] in rows:
            top, gap = each["top5"], each["gap_closed"]
            tail = each["fairness"]["worst_tenth"]
            interval = (
                f"[{gap['low']:.2f}, {gap['high']:.2f}]"
                if gap["low"] not in (None, gap["value"])
                else ""
            )
            rounds = each["to_threshold"]["rounds"]["mean"]
            expected = (
                f"{100 * top['mean']:.1f}±{100 * top['sd']:.1f} "
                f"{100 * tail['mean']:.1f}±{100 * tail['sd']:.1f} "
                f"{gap['value']:.2f} {interval} {rounds:.1f}"
            )
            assert rows.pop(each["sampler"]).split()[: len(expected.split())] == expected.split()
    assert not rows


def interval(row: dict[str, str], name: str = "gap_mean_accuracy") -> str:
    """The gap closed, as pages show it."""
    return "{:.2f} [{:.2f}, {:.2f}]".format(
        *(float(row[f"{name}{end}"] or "nan") for end in ("", "_low", "_high"))
    )


#: What the server can do where a row of the README, or a step of the page, applies.
SITUATIONS: list[dict[str, Any]] = [
    {},
    {"labels": True, "census": False},
    {"census": False},
    {"census": False, "memory": False},
]


def test_the_readme_and_the_page_name_what_recommend_answers() -> None:
    text = (ROOT / "README.md").read_text()
    box = text.partition("## Which sampler?")[2].partition("\n\n")[0]
    rows = [line for line in box.splitlines() if line.startswith("| ") and "`" in line]
    page = (ROOT / "docs" / "how-to" / "which-sampler.md").read_text()
    steps = re.findall(r"^\d\. (.*?)(?=^\d\. |\n\n)", page, re.DOTALL | re.MULTILINE)
    assert len(rows) == 3 and len(steps) == 4
    for said, situation in zip(rows + steps, SITUATIONS[:3] + SITUATIONS, strict=True):
        first = re.search(r"`([^`]+)`", said)
        assert first is not None
        for sizes in (None, True, False):
            assert recommend(unequal_sizes=sizes, **situation).label == first[1]


@pytest.mark.parametrize(
    "document",
    sorted(
        page.relative_to(ROOT).as_posix()
        for page in (ROOT / "docs").glob("*/**/*.md")
        if page.name not in EXEMPT
    ),
)
def test_a_page_is_short_and_begins_with_something_to_type(document: str) -> None:
    text = (ROOT / document).read_text()
    before, fence, _ = text.partition("```")
    assert len(text.split()) <= 900
    assert fence and len(before.split()) <= 150


def test_what_watch_shows_of_a_plan_is_what_the_page_on_plans_shows() -> None:
    """Both are of one command, which takes too long to play here."""
    watch, plan = ((ROOT / f"docs/how-to/{name}.md").read_text() for name in ("watch", "plan"))
    (cost,) = re.findall(r"cost planned +\S+ of (.*) to 80\.00% with (.*)\n", watch)
    assert f"cost {cost[0]}." in plan and f"take {cost[1]}:" in plan
    assert len(re.findall(r"(?m)^\$? ?(deltafl plan .* --seeds 3)", watch + plan)) == 2


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_files_that_documents_name_are_there() -> None:
    for document in DOCUMENTS:
        named = re.findall(
            r"(?:tests|src|benchmarks|reproduction|docs|results)/[\w./-]+\.(?:py|md|json)\b",
            document.read_text(),
        )
        missing = [
            name
            for name in named
            if not (ROOT / name).exists() and not (document.parent / name).exists()
        ]
        assert not missing, f"{document.name} names {missing}"


def test_the_page_on_models_averages_buffers_by_the_rounds_coefficients() -> None:
    torch = pytest.importorskip("torch")
    page = (ROOT / "docs" / "how-to" / "models.md").read_text()
    block = next(
        code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "coef_n" in code
    )
    plan = make_plan("uniform", [1, 2, 3], 2)
    state = init_round(plan, np.zeros(4))
    cohort = open_round(plan, state)
    locals_n = [torch.nn.BatchNorm1d(2) for _ in cohort.client_n]
    for place, layer in enumerate(locals_n):
        layer.running_mean[:] = float(place + 1)
    model = torch.nn.BatchNorm1d(2)
    exec(
        block, {"plan": plan, "state": state, "cohort": cohort, "model": model, "locals": locals_n}
    )
    coef_n = plan.collect_replies(state, cohort).coef_n
    expected = coef_n @ np.array([1, 2]) / coef_n.sum()
    np.testing.assert_allclose(model.running_mean.numpy(), expected, rtol=1e-6)
    np.testing.assert_allclose(model.running_var.numpy(), 1)
