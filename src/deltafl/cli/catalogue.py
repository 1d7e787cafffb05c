"""``deltafl samplers``, ``deltafl tasks``, ``deltafl data``: what there is, and getting the
data.
"""

import re
import sys
from collections.abc import Iterable
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..analysis.narrow import NarrowTable, show
from ..analysis.recommendation import recommend as answer
from ..designs.table import DESIGNS
from ..errors import unknown_name
from ..estimators.learned_coefficient import LearnedCoefficient
from ..estimators.table import ALL_ESTIMATORS, find_estimator
from ..plan import make_plan
from ..samplers.base import RunFacts
from ..samplers.label import Label, is_unbiased, make_sampler, needs_scores, parse_label
from ..samplers.table import NEEDS, SAMPLERS
from ..simulation.settings import TASK_DEFAULTS, CompareSettings, RunSettings, make_settings
from ..tasks.data.files import check, fetch
from ..tasks.metrics import METRICS
from ..tasks.partitions import PARTITIONS
from ..tasks.registry import known_tasks
from .common import path_name, say
from .options import allowed, text_of

app = typer.Typer(rich_markup_mode=None)
_YES = {True: "yes", False: "no"}
data = typer.Typer(
    help="Get and check data sets.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(data, name="data")

Where = Annotated[
    Path | None,
    typer.Option("--data-dir", help="folder for data sets", metavar="DIR", parser=path_name),
]


@app.command()
def samplers(name: Annotated[str | None, typer.Argument(metavar="[NAME]")] = None) -> None:
    """List the samplers, designs and estimators, or describe one of them, or a label, with its
    options.

    Example: deltafl samplers census+average=0.5
    """
    if name is None:
        _print_methods()
        return
    # A sampler and an estimator may share their name, as ``innovation`` does.
    if name in SAMPLERS or not (name in DESIGNS or name in ALL_ESTIMATORS):
        _print_label(name)
    if name in DESIGNS:
        _print_design(name)
    if name in ALL_ESTIMATORS:
        if name in SAMPLERS:
            say("")
        _print_estimator(name)


def _print_methods() -> None:
    """Print all samplers, designs and estimators, with what a table cannot say below it."""
    entries = SAMPLERS.values()
    _print_table(
        ("sampler", "design", "estimator", "unbiased", "needs"),
        ((e.name, e.design or "its own", e.estimator, _claim(e.name), e.needs) for e in entries),
    )
    say(
        "If R > 0: delta never draws, and so misses, a client whose update is the mean of all and "
        "has no local noise;",
        "delta(floor=0.1) is always unbiased.",
        "fedpracis and pracdelta ignore the clients' weights in their scores, as the paper prints "
        "them; where sizes",
        "differ, pracdelta(weighted=True) is better.",
        "",
    )
    _print_table(
        ("sampler", "source"),
        ((entry.name, entry.source) for entry in entries),
    )
    _print_table(("needs", "what the server must know"), NEEDS.items())
    say("Another design or estimator: name@design@estimator, such as fedis@multinomial", "")
    _print_table(
        ("design", "exact", "cohort", "variance", "source"),
        ((d.name, _YES[d.exact], d.kind, d.variance, d.source or "-") for d in DESIGNS.values()),
    )
    say(
        "variance: how good info.variance is; close: for many clients; rough: mostly too large, "
        "but no bound",
        "",
    )
    rules = ALL_ESTIMATORS.values()
    _print_table(
        ("estimator", "unbiased", "source"),
        ((e.name, _YES[e.unbiased], e.source or "-") for e in rules),
    )
    say(
        "With norm_guard or clip none of them is unbiased: these settings shorten steps or updates "
        "that are too long.",
        "The estimator twin needs --public examples.",
        "",
        "A label is SAMPLER(option=value)@DESIGN@ESTIMATOR+setting=value, all but the sampler "
        "optional: uniform,",
        "osmd(mixing=0.3)@poisson, uniform@@fedvarp, census+average=0.5+scaffold.",
    )


def _print_design(name: str) -> None:
    design = DESIGNS[name]
    rows = [
        ("what it does", _about(design.draw_balanced or design.draw)),
        ("exact", _YES[design.exact]),
        ("source", design.source or "-"),
    ]
    _print_table(("design", name), rows)
    say(f"Write it in the label: SAMPLER@{name}")


def _print_estimator(name: str) -> None:
    rule = ALL_ESTIMATORS[name]
    control = _about(type(rule.control))
    # The wrapper says how beta is learnt, and what it holds where c comes from.
    if isinstance(rule.control, LearnedCoefficient):
        control = f"{control} Here: {_about(type(rule.control.control))}"
    rows = [
        ("weights", _about(rule.coefficients)),
        ("control variate", control),
        ("unbiased", _YES[rule.unbiased]),
        ("source", rule.source or "-"),
    ]
    _print_table(("estimator", name), rows)
    say(f"Write it in the label: SAMPLER@@{name}")


def _print_label(text: str) -> None:
    """Print what a method does, what it needs, its sampler's options, and the settings in its
    label.
    """
    label = parse_label(text)
    require_label(label)
    entry = label.entry
    # With the defaults, which are shown below.
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
        (name, text_of(getattr(made, name)), made.ranges.get(name, ""), meanings.get(name, ""))
        for name in entry.options
    ]
    if options:
        _print_table(("option", "default", "range", "meaning"), options)
        say(f"Write options in the label: {label.name}({options[-1][0]}=VALUE)")
    if label.settings:
        settings(list(label.settings))


def require_label(label: Label) -> None:
    """Refuse a label that no run takes, whatever its task."""
    given = make_settings(RunSettings, {"sampler": str(label)})
    method = label._replace(settings={})  # they are among those of the run
    make_plan(method, [1] * 20, n=10, facts=RunFacts(num_classes=10), parts=given.parts())


def _about(part: object) -> str:
    """The first paragraph of a docstring."""
    return _plain(cleandoc(part.__doc__ or "").partition("\n\n")[0])


def _plain(text: str) -> str:
    """A paragraph of a docstring as one line without its marks."""
    return " ".join(text.replace("``", "").replace("**", "").split())


def _claim(method: "str | Label") -> str:
    """Whether a method is unbiased."""
    label = parse_label(method)
    if not is_unbiased(label):
        return "no"
    control = find_estimator(label.estimator).control
    return "if R > 0" if needs_scores(make_sampler(label), control) else "yes"


def _meanings(kind: type) -> dict[str, str]:
    """What docstrings say of the attributes of a class and its bases."""
    found = {}
    # Bases first, so that what a class says itself takes the place of their words.
    for base in reversed(kind.__mro__):
        attributes = cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        for name, text in re.findall(
            r"^    (\w+): (.*(?:\n     .*)*)",
            attributes,
            re.MULTILINE,
        ):
            found[name] = _plain(text)
    return found


def _asked(meaning: str, question: str) -> Any:
    """An option that is asked for at a terminal; elsewhere it has to be given."""
    # A program without a console has no ``stdin``.
    at_terminal = sys.stdin is not None and sys.stdin.isatty()
    return typer.Option(help=meaning, prompt=at_terminal and question)


@app.command()
def recommend(
    sizes: Annotated[
        Literal["equal", "unequal", "unknown"],
        _asked("numbers of examples of the clients", "Are clients of equal size"),
    ],
    labels: Annotated[
        bool,
        _asked(
            "the server may know each client's shares of labels",
            "May the server know the labels",
        ),
    ],
    census: Annotated[
        bool,
        _asked(
            "every client can do one round's work and answer once, before the first draw",
            "Can every client answer a census once",
        ),
    ],
    memory: Annotated[
        bool,
        _asked(
            "the server can keep one update of each client",
            "Can it keep one update per client",
        ),
    ],
    reachable: Annotated[
        bool,
        _asked(
            "every selected client can be expected to reply",
            "Can all clients be reached",
        ),
    ],
    clients: Annotated[
        int | None,
        typer.Option(
            help="number of clients, for n, the cost, and methods that take no more",
            metavar="M",
        ),
    ] = None,
    parameters: Annotated[
        int | None,
        typer.Option(
            help="parameters of the model, for the cost",
            metavar="D",
        ),
    ] = None,
    model: Annotated[
        Literal["linear", "cnn"] | None,
        typer.Option(help="compare methods with the settings for such a model"),
    ] = None,
) -> None:
    """Recommend a sampler for your federation, with the evidence; at a terminal it asks for options
    that are not given.

    Example: deltafl recommend --sizes unequal --no-labels --census --memory --reachable
    """
    text = answer(
        # A switch has two positions, and sizes may be unknown.
        unequal_sizes={"equal": False, "unequal": True, "unknown": None}[sizes],
        labels=labels,
        census=census,
        memory=memory,
        reachable=reachable,
        clients=clients,
        parameters=parameters,
        model=model,
    )
    say(*str(text).splitlines())


@app.command()
def tasks() -> None:
    """List the tasks and the ways to split their examples over clients.

    Example: deltafl tasks
    """
    specs = known_tasks().values()
    rows = []
    for spec in specs:
        clients = "all" if spec.all_owners else spec.num_clients
        partition = spec.partition or "its own"
        needs = ", ".join(spec.needs)
        rows.append((spec.name, clients, spec.sample_size, spec.rounds, partition, needs))
    _print_table(("task", "clients", "selected", "rounds", "partition", "needs"), rows)
    _print_table(
        ("task", "what is learnt"),
        ((spec.name, spec.summary) for spec in specs),
    )
    _print_table(
        ("partition", "who holds what"),
        ((name, split.summary) for name, split in PARTITIONS.items()),
    )
    say(
        "Your own: --task my_task.py:make_task, or --task table.csv --label L with --column CLIENT "
        "or",
        "--partition dirichlet --clients 20, or --partition my_split.py:split. The page "
        "docs/tutorial/own-data.md shows all ways.",
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
    run = RunSettings.model_json_schema()["properties"]
    compare = CompareSettings.model_json_schema()["properties"]
    chosen = names or list(fields)
    rows = []
    for key in chosen:
        of = "both"
        if key not in compare:
            of = "run"
        if key not in run:
            of = "compare"
        default = "the task's" if key in TASK_DEFAULTS else text_of(fields[key].default)
        rows.append((key, of, allowed((compare | run)[key]), default))
    _print_table(("setting", "command", "allowed", "default"), rows)
    _print_table(
        ("setting", "meaning"),
        ((key, fields[key].description or "") for key in chosen),
    )
    if "metric" in (names or ()):
        _print_table(
            ("metric", "better", "targets"),
            (
                (metric.name, "higher" if metric.higher else "lower", ", ".join(metric.targets))
                for metric in METRICS.values()
            ),
        )
        say(
            "Also top_2_accuracy, top_3_accuracy, ...; your own: FILE.py:FUNCTION. See "
            "docs/how-to/metrics.md."
        )


def _print_table(headings: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> None:
    """Print a plain table; only its last column may be folded."""
    cells = [[*map(str, row)] for row in rows]
    last = len(headings) - 1
    show(NarrowTable(headings, cells, folding=[last], box=None, pad_edge=False), "")


@data.command("fetch")
def fetch_data(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    data_dir: Where = None,
) -> None:
    """Download a data set and check it.

    Files that are there already are kept if they have the right checksums.

    Example: deltafl data fetch fashion-mnist
    """
    files = fetch(name, data_dir)
    say(f"{name} is in {files[0].parent}")


@data.command("check")
def check_data(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    data_dir: Where = None,
) -> None:
    """Print where a data set's files are.

    It also says whether they have the right checksums; exit code 1 if not.

    Example: deltafl data check mnist --data-dir ~/data
    """
    statuses = check(name, data_dir)
    for status in statuses:
        say(f"{status.state:<8} {status.file}  {status.path or ''}".rstrip())
    if any(status.state != "ok" for status in statuses):
        raise typer.Exit(1)
