"""The options of ``run`` and ``compare``: one for each setting, made from the fields of the
settings.
"""

import tomllib
from collections.abc import Sequence
from functools import cached_property
from inspect import Parameter, Signature
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, NamedTuple

import typer
from pydantic import BaseModel
from typer.core import TyperCommand

from ..errors import DeltaflError, log, near_names
from ..server.table import IN_TEXT, ROW_OF
from ..simulation.folder.continuing import grown
from ..simulation.folder.directory import RunDirectory, began_by, new_folder, recorded_settings
from ..simulation.folder.own_code import where_it_began
from ..simulation.settings import (
    TASK_DEFAULTS,
    UNION,
    AnySettings,
    make_settings,
    refuse_ignored,
)
from ..store.own_python import files_named, only, working_in
from ..store.values import interval_of, only_kind, read_toml
from ..types import Json
from .common import Out, path_name, say

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="a setting as in a TOML file: proximal=0.01",
        metavar="KEY=VALUE",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        help="TOML file with settings; options win",
        metavar="FILE",
        parser=path_name,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="continue what is in --out")]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="import the Python files that the folder names, too"),
]


class Given(NamedTuple):
    """What a command that writes a folder is given: settings, and where they are kept."""

    settings: Json
    # The others are options of each such command, in this order.
    sets: SetOption = None
    config: Config = None
    out: Out = None
    resume: Resume = False
    trust_code: TrustCode = False

    @property
    def recorded(self) -> Json | None:
        """The settings that the folder holds."""
        if self.out is None:
            return None
        return recorded_settings(self.out)


Quiet = Annotated[bool, typer.Option("--quiet", help="print nothing but the folder of the results")]


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        command: Any = ctx.command
        command.shows_all = True
        say(*ctx.get_help().splitlines())
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all",
        callback=_show_all,
        is_eager=True,
        expose_value=False,
        help="show all options",
    ),
]


#: What people give where they go on: of a new run, these alone do not say what it is.
_GOING_ON = UNION | {"rounds", "goal", "cost", "budget", "threshold"}


#: What ``--help`` shows, in this order; ``--help-all`` shows every option.
_USED_MOST = (
    "goal cost samplers sampler task label column partition clients sample rounds seeds "
    "seed local_rates local_lr metric threshold out resume quiet"
)


def _headings() -> dict[str, str]:
    """Headings of ``--help-all`` and the options below them, in this order; all others come
    last.
    """
    # What alters the updates that clients send is shown with their training.
    of_training = [name for name in IN_TEXT if ROW_OF[name].kind.alters_updates]
    of_server = [name for name in IN_TEXT if name not in of_training]
    return {
        "What to run": "goal cost budget cohorts samplers sampler seeds seed task clients "
        "sample rounds local_rates server_rates tuning_seeds extensions out resume trust_code "
        "config processes executor workers",
        "Local training": "local_lr lr_schedule local_epochs local_steps batch_size local_momentum "
        f"{' '.join(of_training)} proximal fixed_order device",
        "Server": f"{' '.join(of_server)} weights memory_dtype memory_path",
        "Data": "partition alpha column strata label task_type test_share sep encoding public "
        "noise truth data_dir",
        "Clients that are away, slow or silent": "availability speeds dropout deadline "
        "over_select client_costs",
        "Evaluation": "metric threshold stop_at_threshold patience evaluate_every test_examples "
        "validation",
    }


def settings_command(
    kind: type[BaseModel],
    names: Sequence[str] = (),
    writes: bool = True,
) -> type[TyperCommand]:
    """A command with an option for each setting of a class, or for those named; ``ctx.obj`` has
    those that were given, within ``Given`` if the command writes a folder.
    """
    more = Given._field_defaults if writes else {}

    class SettingsCommand(TyperCommand):
        shows_all = False

        @cached_property
        def settings(self) -> list[Any]:
            chosen = [name for name in names or kind.model_fields if name != "rates"]
            schemas = kind.model_json_schema()["properties"]

            def with_settings(**_: Any) -> None:
                """Typer makes options of a signature alone; its own classes differ between
                versions.
                """

            parameters = [_parameter(name, kind, schemas[name]) for name in chosen]
            beside = {"help_all": (False, HelpAll)}
            for name, default in more.items():
                beside[name] = (default, Given.__annotations__[name])
            for name, (default, option) in beside.items():
                parameters.append(
                    Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=option)
                )
            with_settings.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
            alone = typer.Typer(add_completion=False)
            alone.command()(with_settings)
            return list(typer.main.get_command(alone).params)

        def get_params(self, ctx: Any) -> list[Any]:
            return [*self.settings, *super().get_params(ctx)]

        def format_options(self, ctx: Any, formatter: Any) -> None:
            rows = dict[str, Any]()
            for option in self.get_params(ctx):
                record = option.get_help_record(ctx)
                if record is not None:
                    rows[option.name] = record
            if not self.shows_all:
                with formatter.section("Options that people use most"):
                    formatter.write_dl([rows[name] for name in _USED_MOST.split() if name in rows])
                formatter.write_text(f"All {len(rows)} options: {ctx.command_path} --help-all")
                return
            for heading, names_of in _headings().items():
                if shown := [rows.pop(name) for name in names_of.split() if name in rows]:
                    with formatter.section(heading):
                        formatter.write_dl(shown)
            with formatter.section("Other options"):
                formatter.write_dl(list(rows.values()))

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            try:
                return super().parse_args(ctx, args)
            except Exception as error_:
                error: Any = error_
                # The parser's names for an option may be far away.
                if hasattr(error, "possibilities"):
                    flags = [flag for option in self.get_params(ctx) for flag in option.opts]
                    near = near_names(
                        error.option_name.strip("-"),
                        [f.strip("-") for f in flags],
                    )
                    error.possibilities = [f"--{name}" for name in near]
                raise

        def invoke(self, ctx: Any) -> Any:
            # Out of the parameters: the command's own function takes none of them.
            names = [str(option.name) for option in self.settings if option.expose_value]
            given = {name: ctx.params.pop(name) for name in names}
            own = {name: given.pop(name) for name in more}
            ctx.obj = {name: value for name, value in given.items() if value is not None}
            if writes:
                ctx.obj = Given(ctx.obj, **own)
            return super().invoke(ctx)

    return SettingsCommand


def _parameter(name: str, kind: type[BaseModel], schema: Json) -> Parameter:
    field = kind.model_fields[name]
    flag = f"--{name.replace('_', '-')}"
    meaning = field.description or ""
    option: Any = Annotated[bool | None, typer.Option(flag, help=meaning)]
    if field.annotation is not bool:
        # As a default of the option it would stand in brackets of its own.
        if name in TASK_DEFAULTS:
            meaning += "  [the task's]"
        elif field.default is not None:
            meaning += f"  [default: {text_of(field.default)}]"
        metavar = allowed(schema).split()[0]
        hidden = "hidden" in schema
        text = typer.Option(flag, help=meaning, metavar=metavar, hidden=hidden)
        option = Annotated[str | None, text]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=option)


def text_of(default: Any) -> str:
    """A default as it is written on the command line; a dash for None."""
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return "-" if default is None else str(default)


def allowed(schema: Json) -> str:
    """The values that a field's JSON schema allows, for a person."""
    schema = only_kind(schema)
    if words := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return "|".join(words)
    kind = {
        "integer": "N",
        "number": "X",
        "array": "A,B",
        "boolean": "true|false",
    }.get(schema["type"], "NAME")
    interval = interval_of(schema)
    return f"{kind} in {interval}" if interval else kind


def begun(kind: type[AnySettings], ctx: typer.Context) -> tuple[AnySettings, Path]:
    """The settings of a command, and its folder, which is a new one unless it is named.

    Of what the folder names, only Python files that the command names too are imported, unless
    ``trust_code``.
    """
    given = placed(ctx)
    settings = settings_from(kind, given)
    command = str(ctx.command.name)
    return settings, given.out or new_folder(command, settings.task, ctx.call_on_close)


def settings_from(kind: type[AnySettings], asked: Given) -> AnySettings:
    """The settings of a command from its options, checked against what its folder holds already."""
    given = _joined(asked.settings, asked.sets or [])
    out = asked.out
    recorded = asked.recorded
    if recorded is None or out is None:
        if asked.resume:
            _note_beginning(out, bool(given.keys() - _GOING_ON or asked.config))
        settings = make_settings(kind, given, asked.config)
        refuse_ignored(settings, given)
        return settings
    began = began_by(recorded)
    if began not in (None, began_by(kind.model_fields)):
        raise DeltaflError(
            f"{out} holds what deltafl {began} began; go on with: deltafl {began} --resume --out "
            f"{quote(str(out))}, or choose another --out"
        )
    grows = UNION & kind.model_fields.keys() and (UNION | {"rounds"}) & given.keys()
    if not asked.resume and not grows:
        raise DeltaflError(
            f"{out} already holds a run; add --resume to continue it, or choose another --out"
        )
    objects = RunDirectory(out).environment().get("objects")
    if objects:
        raise DeltaflError(
            f"{out} was played from Python with {', '.join(objects)}: go on there with the same "
            f"call of deltafl.compare and out={str(out)!r}"
        )
    # Without a file what is recorded stands wherever no option is given; a file says all.
    if asked.config is None:
        given = recorded | given
    return grown(make_settings(kind, recorded), make_settings(kind, given, asked.config))


def placed(ctx: typer.Context) -> Given:
    """What a command is given, with its folder and its file of settings as they are until it ends;
    what is resumed finds its files from anywhere, as where it began.
    """
    asked: Given = ctx.obj
    out = asked.out
    config = asked.config
    recorded = asked.recorded
    if out is None or recorded is None:
        return asked
    named = files_named(
        [
            asked.settings,
            *(asked.sets or []),
            {} if config is None else read_toml(config, users=True),
        ]
    )
    ctx.with_resource(only(None if asked.trust_code else named))
    here = where_it_began(out)
    if not asked.resume or here == Path.cwd():
        return asked
    # Where a folder says that it began, other files may have the names that are meant.
    if not asked.trust_code and (named or files_named(recorded)):
        raise DeltaflError(
            f"the files that {out} names are in {here}, and Python code is among them, which "
            "would run as you: if you trust it, give the command there, or add --trust-code"
        )
    # From here: afterwards a relative name is another file's.
    absolute = asked._replace(out=out.resolve(), config=config and config.resolve())
    ctx.with_resource(working_in(here))
    return absolute


def _note_beginning(out: Path | None, says_what: bool) -> None:
    """With ``--resume`` where nothing was begun: it begins anew if the options say what."""
    if out is None:
        raise DeltaflError("--resume needs --out DIR, the folder of the run to continue")
    if not says_what:
        raise DeltaflError(
            f"there is no run in {out} to resume; to start one there, leave out --resume, or name "
            "the --task"
        )
    log.info(f"there is nothing to continue in {out}: it begins anew")


def _joined(given: Json, assignments: Sequence[str]) -> Json:
    """Options and what ``--set`` adds to them; nothing is set twice."""
    joined = dict(given)
    for key, value in map(assignment, assignments):
        if key in joined:
            other = f"--{key.replace('_', '-')}" if key in given else "another --set"
            raise DeltaflError(
                f"--set {key}={value} and {other} set the same; leave one of them out"
            )
        joined[key] = value
    return joined


def assignment(text: str) -> tuple[str, Any]:
    """``key=value`` with the value written as in TOML, or a bare word."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise DeltaflError(
            f"--set {text!r} is not KEY=VALUE; write for instance --set proximal=0.01"
        )
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return key.strip(), value.strip()
