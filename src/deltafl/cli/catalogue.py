"""``deltafl samplers``, ``deltafl tasks``, ``deltafl data``: what there is, and getting the
data.
"""

import re
import sys
from collections.abc import Iterable
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from ..analysis.recommend import recommend as answer
from ..designs.table import DESIGNS
from ..errors import unknown_name
from ..estimators.table import ALL_ESTIMATORS, find_estimator
from ..samplers.label import Label, is_unbiased, make_sampler, needs_scores, parse_label
from ..samplers.table import NEEDS, SAMPLERS
from ..simulation.settings import TASK_DEFAULTS, CompareSettings, RunSettings
from ..tasks.files import check, fetch
from ..tasks.partitions import PARTITIONS
from ..tasks.registry import known_tasks
from .options import allowed, text_of

app = typer.Typer(rich_markup_mode=None)
_YES = {True: "yes", False: "no"}
data = typer.Typer(help="Get and check data sets.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data, name="data")

Where = Annotated[
    Path | None, typer.Option("--data-dir", help="folder for data sets", metavar="DIR")
]


@app.command()
def samplers(name: Annotated[str | None, typer.Argument(metavar="[NAME]")] = None) -> None:
    """List the samplers, designs and estimators, or describe one of them, or a label, with its
    options.

    Example: deltafl samplers census+average=0.5
    """
    if name is not None:
        show = (
            _print_design
            if name in DESIGNS
            else _print_estimator
            if name in ALL_ESTIMATORS
            else _print_label
        )
        show(name)
        return
    entries = SAMPLERS.values()
    _print_table(
        ("sampler", "design", "estimator", "unbiased", "needs"),
        ((e.name, e.design or "its own", e.estimator, _claim(e.name), e.needs) for e in entries),
    )
    typer.echo(
        "If R > 0: delta never draws, and so misses, a client whose update is the mean of all and "
        "has no local noise;\n"
        "delta(floor=0.1) is always unbiased.\n"
        "fedpracis and pracdelta ignore the clients' weights in their scores, as the paper prints "
        "them; where sizes\n"
        "differ, pracdelta(weighted=True) is better.\n"
    )
    _print_table(("sampler", "source"), ((entry.name, entry.source) for entry in entries))
    _print_table(("needs", "what the server must know"), NEEDS.items())
    typer.echo("Another design or estimator: name@design@estimator, such as fedis@multinomial\n")
    _print_table(
        ("design", "exact", "cohort", "variance", "source"),
        ((d.name, _YES[d.exact], d.kind, d.variance, d.source or "-") for d in DESIGNS.values()),
    )
    typer.echo(
        "variance: how good info.variance is; close: for many clients; rough: mostly too large, "
        "but no bound\n"
    )
    rules = ALL_ESTIMATORS.values()
    _print_table(
        ("estimator", "unbiased", "source"),
        ((e.name, _YES[e.unbiased], e.source or "-") for e in rules),
    )
    typer.echo(
        "With norm_guard or clip none of them is unbiased: these settings shorten steps or updates "
        "that are too long.\n"
        "The estimator twin needs --public examples.\n\n"
        "A label is SAMPLER(option=value)@DESIGN@ESTIMATOR+setting=value, all but the sampler "
        "optional: uniform,\n"
        "osmd(mixing=0.3)@poisson, uniform@@fedvarp, census+average=0.5+scaffold."
    )


def _print_design(name: str) -> None:

    design = DESIGNS[name]
    rows = [
        ("what it does", _about(design.draw_balanced or design.draw)),
        ("exact", _YES[design.exact]),
    ]
    _print_table(("design", name), [*rows, ("source", design.source or "-")])
    typer.echo(f"Write it in the label: SAMPLER@{name}")


def _print_estimator(name: str) -> None:

    rule = ALL_ESTIMATORS[name]
    controls = (
        _about(type(part))
        for part in (rule.control, getattr(rule.control, "control", None))
        if part
    )
    rows = [("weights", _about(rule.coefficients)), ("control variate", " Here: ".join(controls))]
    _print_table(
        ("estimator", name),
        [*rows, ("unbiased", _YES[rule.unbiased]), ("source", rule.source or "-")],
    )
    typer.echo(f"Write it in the label: SAMPLER@@{name}")


def _print_label(text: str) -> None:
    """Print what a method does, what it needs, its sampler's options, and the settings in its
    label.
    """
    label = parse_label(text)
    entry = label.entry
    made = entry.make({})
    rows = [
        ("what it does", _about(type(made))),
        ("needs", NEEDS[entry.needs]),
        ("design", label.design or "its own"),
        ("estimator", label.estimator),
        ("unbiased", _claim(label)),
        ("source", entry.source),
    ]
    _print_table(("sampler", label.name), rows)
    meanings = _meanings(type(made))
    options = [
        (
            option,
            text_of(getattr(made, option)),
            made.ranges.get(option, ""),
            meanings.get(option, ""),
        )
        for option in entry.options
    ]
    if options:
        _print_table(("option", "default", "range", "meaning"), options)
        typer.echo(f"Write options in the label: {label.name}({options[-1][0]}={options[-1][1]})")
    if label.settings:
        settings(list(label.settings))


def _about(part: object) -> str:
    """The first paragraph of a docstring."""
    return " ".join(cleandoc(part.__doc__ or "").partition("\n\n")[0].replace("``", "").split())


def _claim(method: "str | Label") -> str:
    """Whether a method is unbiased."""
    label = parse_label(method)
    if not is_unbiased(label):
        return "no"
    return (
        "if R > 0"
        if needs_scores(make_sampler(label), find_estimator(label.estimator).control)
        else "yes"
    )


def _meanings(kind: type) -> dict[str, str]:
    """What docstrings say of the attributes of a class and its bases."""
    found = {}
    for base in reversed(kind.__mro__):
        attributes = cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n     .*)*)", attributes, re.MULTILINE):
            found[name] = " ".join(text.replace("``", "").split())
    return found


def _asked(question: str) -> str | bool:
    """The question, where there is a terminal to ask it at; elsewhere, as in a notebook, its
    option has to be given.
    """
    return question if sys.stdin is not None and sys.stdin.isatty() else False


@app.command()
def recommend(
    sizes: Annotated[
        Literal["equal", "unequal", "unknown"],
        typer.Option(
            help="numbers of examples of the clients", prompt=_asked("Are clients of equal size")
        ),
    ],
    labels: Annotated[
        bool,
        typer.Option(
            help="the server may know each client's shares of labels",
            prompt=_asked("May the server know the labels"),
        ),
    ],
    census: Annotated[
        bool,
        typer.Option(
            help="every client can do one round's work and answer once, before the first draw",
            prompt=_asked("Can every client answer a census once"),
        ),
    ],
    memory: Annotated[
        bool,
        typer.Option(
            help="the server can keep one update of each client",
            prompt=_asked("Can it keep one update per client"),
        ),
    ],
    reachable: Annotated[
        bool,
        typer.Option(
            help="every selected client can be expected to reply",
            prompt=_asked("Can all clients be reached"),
        ),
    ],
    clients: Annotated[
        int | None, typer.Option(help="number of clients, for the cost", metavar="M")
    ] = None,
    parameters: Annotated[
        int | None, typer.Option(help="parameters of the model, for the cost", metavar="D")
    ] = None,
) -> None:
    """Recommend a sampler for your federation, with the evidence; at a terminal it asks for options
    that are not given.

    Example: deltafl recommend --sizes unequal --no-labels --census --memory --reachable
    """
    unequal = {"equal": False, "unequal": True, "unknown": None}[sizes]
    federation = {"labels": labels, "census": census, "memory": memory, "reachable": reachable}
    typer.echo(answer(unequal_sizes=unequal, **federation, clients=clients, parameters=parameters))


@app.command()
def tasks() -> None:
    """List the tasks and the ways to split their examples over clients.

    Example: deltafl tasks
    """
    specs = known_tasks().values()
    rows = []
    for spec in specs:
        clients = "all" if spec.all_owners else str(spec.num_clients)
        numbers = (clients, str(spec.sample_size), str(spec.rounds))
        rows.append((spec.name, *numbers, spec.partition or "its own", ", ".join(spec.needs)))
    _print_table(("task", "clients", "selected", "rounds", "partition", "needs"), rows)
    _print_table(("task", "what is learnt"), ((spec.name, spec.summary) for spec in specs))
    _print_table(
        ("partition", "who holds what"),
        ((name, split.summary) for name, split in PARTITIONS.items()),
    )
    typer.echo(
        "Your own: --task my_task.py:make_task, or --task table.csv --label L with --column CLIENT "
        "or\n"
        "--partition dirichlet --clients 20. The page docs/own-data.md shows all ways."
    )


@app.command()
def settings(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...")] = None,
) -> None:
    """List the settings of run and compare with their defaults, or some of them.

    Example: deltafl settings local_lr
    """
    fields = RunSettings.model_fields | CompareSettings.model_fields
    for name in names or ():
        if name not in fields:
            raise unknown_name("setting", name, fields)
    run, compare = (
        kind.model_json_schema()["properties"] for kind in (RunSettings, CompareSettings)
    )
    chosen = names or list(fields)
    rows = []
    for key in chosen:
        of = "compare" if key not in run else "both" if key in compare else "run"
        default = "the task's" if key in TASK_DEFAULTS else text_of(fields[key].default)
        rows.append((key, of, allowed((compare | run)[key]), default))
    _print_table(("setting", "of", "allowed", "default"), rows)
    _print_table(("setting", "meaning"), ((key, fields[key].description or "") for key in chosen))


def _print_table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a plain table; only its last column may be folded."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, no_wrap=heading != headings[-1])
    for row in rows:
        table.add_row(*row)
    Console().print(table, "")


@data.command("fetch")
def fetch_data(
    name: Annotated[str, typer.Argument(metavar="NAME")], data_dir: Where = None
) -> None:
    """Download a data set and compare it with its checksums; what is there already is kept.

    Example: deltafl data fetch fashion-mnist
    """
    files = fetch(name, data_dir)
    typer.echo(f"{name} is in {files[0].parent}")


@data.command("check")
def check_data(
    name: Annotated[str, typer.Argument(metavar="NAME")], data_dir: Where = None
) -> None:
    """Print where a data set's files are and whether they are the right ones; exit code 1 if not.

    Example: deltafl data check mnist --data-dir ~/data
    """
    statuses = check(name, data_dir)
    for status in statuses:
        typer.echo(f"{status.state:<8} {status.file}  {status.path or ''}".rstrip())
    if any(status.state != "ok" for status in statuses):
        raise typer.Exit(1)
