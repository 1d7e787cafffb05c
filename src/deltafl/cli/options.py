"""The options of ``run`` and ``compare``: one for each setting, made from the fields of the settings."""

import inspect
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from ..errors import DeltaflError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from ..simulation.settings import AnySettings, Settings

SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="a setting as in a TOML file: proximal=0.01", metavar="KEY=VALUE")
]
Config = Annotated[Path | None, typer.Option(help="TOML file with settings; options win", metavar="FILE")]
Out = Annotated[Path | None, typer.Option(help="where results go", metavar="DIR")]
Resume = Annotated[bool, typer.Option("--resume", help="continue what is in --out")]


class SettingsCommand:
    """A command of Typer with an option for each setting of a kind, beside the parameters of its function.

    The settings are loaded when the options are needed, so that importing the command line loads no NumPy.

    Args:
        function: Gets the options that were given as ``given``, and its own parameters by name.
        kind: The name of the settings' class in ``deltafl.simulation``.
        names: The settings that become options; all if left out.
    """

    def __init__(self, function: Callable[..., None], kind: str, names: Sequence[str] | None = None) -> None:
        self._function, self._kind, self._names = function, kind, names
        self.__name__, self.__doc__ = function.__name__.removeprefix("_"), function.__doc__

    def __call__(self, **parameters: Any) -> None:
        """What Typer calls."""
        own = set(inspect.signature(self._function).parameters)
        given = {key: value for key, value in parameters.items() if key not in own and value is not None}
        self._function(given, **{key: value for key, value in parameters.items() if key in own})

    @property
    def __signature__(self) -> inspect.Signature:
        """The options that Typer makes."""
        own = list(inspect.signature(self._function, eval_str=True).parameters.values())[1:]
        return inspect.Signature([*self._settings(), *own])

    @property
    def __annotations__(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: parameter.annotation for name, parameter in self.__signature__.parameters.items()}

    def _settings(self) -> Iterator[inspect.Parameter]:
        from ..simulation.settings import TASK_DEFAULTS

        fields = getattr(import_module("deltafl.simulation"), self._kind).model_fields
        for name in self._names or fields:
            field = fields[name]
            shown = "the task's" if name in TASK_DEFAULTS else False if field.default is None else _text(field.default)
            option = typer.Option(
                f"--{name.replace('_', '-')}", help=field.description, metavar=_metavar(field), show_default=shown
            )
            kind = Annotated[str | None, option]
            yield inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=kind)


def _text(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _metavar(field: "FieldInfo") -> str:
    kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if kind is not type(None)]
    for kind in kinds:
        if get_origin(kind) is Literal:
            return "|".join(map(str, get_args(kind)))
    text = str(field.annotation)
    return "A,B" if "tuple" in text else "N" if "int" in text else "X" if "float" in text else "NAME"


def settings_from(
    kind: "type[AnySettings]",
    given: Mapping[str, Any],
    sets: Sequence[str] | None,
    config: Path | None,
    out: Path | None,
    resume: bool,
) -> "AnySettings":
    """The settings of a command, checked against what its folder holds already.

    Args:
        kind: ``RunSettings`` or ``CompareSettings``.
        given: The options that were given.
        sets: ``--set``.
        config: ``--config``.
        out: ``--out``.
        resume: ``--resume``.

    Raises:
        DeltaflError: If a setting is impossible, or contradicts what the folder holds.
    """
    from ..simulation.directory import recorded_settings
    from ..simulation.settings import make_settings, require_same_settings

    given = _joined(given, sets or [])
    recorded = recorded_settings(out) if out else None
    if recorded is not None:
        _refuse_other_command(kind, recorded, out)
    if resume and out is None:
        raise DeltaflError("--resume needs --out DIR, the folder of the run to continue")
    if resume and recorded is None and not given and config is None:
        raise DeltaflError(f"there is no run in {out} to resume; leave out --resume to start one")
    if recorded is not None and not resume:
        raise DeltaflError(f"{out} already holds a run; add --resume to continue it, or choose another --out")
    if recorded is None:
        settings = make_settings(kind, given, config)
        _refuse_ignored(settings, given)
        return settings
    before = make_settings(kind, recorded)
    now = make_settings(kind, {**recorded, **given}) if config is None else make_settings(kind, given, config)
    if given or config is not None:
        require_same_settings(before, now)
        return now
    return before


def new_folder(command: str, task: str) -> Path:
    """A folder of its own below ``runs`` for a command without ``--out``."""
    from ..tasks.own import short_name

    folder = Path("runs") / f"{command}-{short_name(task)}-{datetime.now():%Y%m%d-%H%M%S}"
    number = 1
    while folder.exists():
        number += 1
        folder = folder.with_name(f"{folder.name.removesuffix(f'-{number - 1}')}-{number}")
    return folder


def _joined(given: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
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
    """Refuse options that task and partition do not look at; a file of settings may serve several of them."""
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
