"""The options that ``run`` and ``compare`` share, and how they become settings.

No option has a default here: what is not given comes from ``--config``, then from the task (see ``settings.py``).
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DeltaflError

if TYPE_CHECKING:
    from ..simulation.settings import AnySettings, Settings

#: Parameters of a command that are not settings.
NOT_SETTINGS = {"config", "out", "resume", "set_"}
#: Settings that may differ when a run is continued: they do not change its result.
FREE_ON_RESUME = {"workers", "data_dir", "checkpoint_every"}

TaskOption = Annotated[
    str | None, typer.Option("--task", help="what is learnt; `deltafl tasks`, or FILE.py:FUNCTION", metavar="NAME")
]
Clients = Annotated[int | None, typer.Option(help="clients m", metavar="M")]
Sample = Annotated[int | None, typer.Option(help="clients asked a round, n", metavar="N")]
Rounds = Annotated[int | None, typer.Option(help="communication rounds", metavar="T")]
LocalEpochs = Annotated[int | None, typer.Option(help="local passes over the data", metavar="K")]
LocalSteps = Annotated[int | None, typer.Option(help="local steps, instead of epochs", metavar="K")]
BatchSize = Annotated[int | None, typer.Option(help="examples a minibatch", metavar="B")]
LocalLr = Annotated[float | None, typer.Option(help="local learning rate", metavar="X")]
ServerLr = Annotated[float | None, typer.Option(help="server learning rate", metavar="X")]
ServerOptimizerOption = Annotated[
    str | None, typer.Option("--server-optimizer", help="sgd momentum adagrad adam yogi", metavar="NAME")
]
PartitionOption = Annotated[
    str | None, typer.Option("--partition", help="who holds what; `deltafl tasks`", metavar="NAME")
]
Alpha = Annotated[float | None, typer.Option(help="concentration of Dirichlet partitions", metavar="X")]
Weights = Annotated[str | None, typer.Option(help="target: data (n_i / N) or uniform (1 / m)", metavar="NAME")]
Floor = Annotated[float | None, typer.Option(help="evenly drawn share of the cohort", metavar="G")]
Threshold = Annotated[float | None, typer.Option(help="accuracy (or loss) to reach", metavar="X")]
WorkersOption = Annotated[int | None, typer.Option("--workers", help="processes that train clients", metavar="W")]
DataDir = Annotated[str | None, typer.Option(help="folder with data sets", metavar="DIR")]
Config = Annotated[Path | None, typer.Option(help="TOML file with settings; options win", metavar="FILE")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="any other setting: proximal=0.01", metavar="KEY=VALUE")
]
Out = Annotated[Path | None, typer.Option(help="where results go", metavar="DIR")]
Resume = Annotated[bool, typer.Option("--resume", help="continue what is in --out")]


@contextmanager
def opened(kind: "type[AnySettings]", params: Mapping[str, Any], command: str) -> "Iterator[tuple[AnySettings, Path]]":
    """Settings and output folder of a command, checked against what the folder holds already.

    No other process can play in the folder until the end of the block (``simulation/lock.py``).

    Args:
        kind: ``RunSettings`` or ``CompareSettings``.
        params: The command's parameters as they were given.
        command: Its name, for the default folder.

    Raises:
        DeltaflError: If a setting is impossible, the folder is in use, or ``--resume`` contradicts its record.
    """
    from ..simulation.lock import claimed, claimed_new
    from ..tasks.own import short_name

    # Typer before 0.21 leaves paths as text in a context's parameters.
    params = {**params, **{key: Path(params[key]) for key in ("out", "config") if params[key] is not None}}
    out: Path | None = params["out"]
    if out is not None:
        with claimed(out):
            yield _settings_from(kind, params, out), out
        return
    settings = _settings_from(kind, params, None)
    name = f"{command}-{short_name(settings.task)}-{datetime.now():%Y%m%d-%H%M%S}"
    with claimed_new(Path("runs") / name) as out:
        yield settings, out


def _settings_from(kind: "type[AnySettings]", params: Mapping[str, Any], out: Path | None) -> "AnySettings":
    """The settings of a command for a folder that was named, or is to be made."""
    from ..simulation.records import recorded_settings
    from ..simulation.settings import make_settings

    given = {key: value for key, value in params.items() if value is not None and key not in NOT_SETTINGS}
    given = _joined(given, params["set_"] or [])
    recorded = recorded_settings(out) if out else None
    if recorded is not None:
        _refuse_other_command(kind, recorded, out)
    if params["resume"]:
        if out is None:
            raise DeltaflError("--resume needs --out DIR, the folder of the run to continue")
        if recorded is None and not given and params["config"] is None:
            raise DeltaflError(f"there is no run in {out} to resume; leave out --resume to start one")
        if recorded is not None:
            return _continued(kind, recorded, given, params["config"])
    elif recorded is not None:
        raise DeltaflError(f"{out} already holds a run; add --resume to continue it, or choose another --out")
    settings = make_settings(kind, given, params["config"])
    _refuse_ignored(settings, given)
    return settings


def _joined(given: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Options and what ``--set`` adds to them; nothing is set twice."""
    joined = dict(given)
    for key, value in map(assignment, assignments):
        if key in joined:
            other = f"--{key.replace('_', '-')}" if key in given else "another --set"
            raise DeltaflError(f"--set {key}={value} and {other} set the same; leave one of them out")
        joined[key] = value
    return joined


def _refuse_other_command(kind: "type[Settings]", recorded: Mapping[str, Any], out: Path | None) -> None:
    """Tell the folder of a run from that of a comparison, and both from an experiment's."""
    holds = {
        "sampler": f"a run; go on with: deltafl run --resume --out {out}",
        "samplers": f"a comparison; go on with: deltafl compare --resume --out {out}",
        "experiment": "an experiment; go on with: deltafl reproduce",
    }
    for key, what in holds.items():
        if key in recorded and key not in kind.model_fields:
            raise DeltaflError(f"{out} holds {what}, or choose another --out")


def _refuse_ignored(settings: "Settings", given: Mapping[str, Any]) -> None:
    """Refuse options that task, partition and samplers do not look at; a file of settings may serve several of them."""
    from ..tasks.own import is_own
    from ..tasks.partitions import PARTITIONS

    of_synthetic = settings.task == "synthetic", "only the task 'synthetic' has it"
    partition = PARTITIONS.get(settings.partition or "")
    used = {
        "noise": of_synthetic,
        "truth": of_synthetic,
        "alpha": (partition is not None and partition.uses_alpha, "only Dirichlet partitions have it"),
        "column": (
            is_own(settings.task) or (partition is not None and partition.uses_column),
            "only the partition 'natural' and tables have it",
        ),
    }
    for key, (matters, who) in used.items():
        if key in given and not matters:
            raise DeltaflError(f"{key} does nothing here: {who}; leave it out")
    own = settings.model_dump(include={"sampler", "samplers"})
    _refuse_unread(own.get("samplers") or [own["sampler"]], given)


def _refuse_unread(labels: Sequence[str], given: Mapping[str, Any]) -> None:
    """Refuse options of other samplers."""
    from ..samplers import SAMPLERS, parse_label
    from ..simulation.settings import OLD_OPTIONS, is_read

    chosen = {parse_label(label).name for label in labels}
    for key in OLD_OPTIONS.keys() & given:
        users = [name for name in SAMPLERS if is_read(name, key)]
        if users and not chosen.intersection(users):
            raise DeltaflError(
                f"{key} does nothing here: it is an option of {', '.join(users)}, not of {', '.join(sorted(chosen))}; "
                "leave it out"
            )


def _continued(
    kind: "type[AnySettings]", recorded: dict[str, Any], given: dict[str, Any], config: Path | None
) -> "AnySettings":
    """The recorded settings, if what is given now does not contradict them."""
    from ..simulation.settings import make_settings

    before = make_settings(kind, recorded)
    if not given and config is None:
        return before
    now = make_settings(kind, {**recorded, **given}) if config is None else make_settings(kind, given, config)
    for key in kind.model_fields:
        if key not in FREE_ON_RESUME and getattr(now, key) != getattr(before, key):
            raise DeltaflError(
                f"the run was started with {key} = {getattr(before, key)}, not {getattr(now, key)}; "
                "leave the option out, or choose another --out"
            )
    return now


def assignment(text: str) -> tuple[str, Any]:
    """``key=value`` with the value written as in TOML, or a bare word.

    Raises:
        DeltaflError: If there is no ``=`` or nothing before it.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise DeltaflError(f"--set {text!r} is not KEY=VALUE; write for instance --set proximal=0.01")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()
