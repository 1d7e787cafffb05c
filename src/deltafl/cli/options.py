"""The options of ``run`` and ``compare``: one for each setting, made from the fields of the
settings.
"""

import logging
import tomllib
from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import Parameter, Signature
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from ..errors import DeltaflError, near_names
from ..server.table import IN_TEXT, ROW_OF
from ..simulation.directory import RunDirectory, recorded_settings
from ..simulation.settings import (
    TASK_DEFAULTS,
    UNION,
    AnySettings,
    grown,
    make_settings,
    refuse_ignored,
)

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="a setting as in a TOML file: proximal=0.01", metavar="KEY=VALUE"),
]
Config = Annotated[
    Path | None, typer.Option(help="TOML file with settings; options win", metavar="FILE")
]
Resume = Annotated[bool, typer.Option("--resume", help="continue what is in --out")]


#: What a folder holds, by the first of these that is among its settings.
_HOLDS = {
    "tuning_seeds": "tuning runs; go on with: deltafl tune --resume --out {out}",
    "sampler": "a run; go on with: deltafl run --resume --out {out}",
    "samplers": "a comparison; go on with: deltafl compare --resume --out {out}",
}


def _headings() -> dict[str, str]:
    """Headings of ``--help`` and the options below them, in this order; all others come last."""
    of_training = [name for name in IN_TEXT if ROW_OF[name].kind.alters_updates]
    of_server = [name for name in IN_TEXT if name not in of_training]
    return {
        "What to run": "samplers sampler seeds seed task clients sample rounds local_rates "
        "server_rates tuning_seeds extensions out resume config processes workers",
        "Local training": "local_lr local_epochs local_steps batch_size local_momentum "
        f"{' '.join(of_training)} proximal fixed_order device",
        "Server": f"{' '.join(of_server)} weights memory_dtype memory_path",
        "Data": "partition alpha column label task_type public noise truth data_dir",
        "Clients that are away, slow or silent": "availability speeds dropout deadline over_select",
        "Evaluation": "threshold stop_at_threshold evaluate_every test_examples validation",
    }


def settings_command(kind: type[BaseModel], names: Sequence[str] = ()) -> type[TyperCommand]:
    """A command with an option for each setting of a class, or for those named; ``ctx.obj`` has
    those that were given.
    """

    class SettingsCommand(TyperCommand):
        @cached_property
        def settings(self) -> list[Any]:

            fields = kind.model_fields
            schemas = kind.model_json_schema()["properties"]
            chosen = [name for name in names or fields if name != "rates"]

            def with_settings(**_: Any) -> None:
                """Typer makes options of a signature alone; its own classes differ between
                versions.
                """

            parameters = [
                _parameter(name, fields[name], schemas[name], name in TASK_DEFAULTS)
                for name in chosen
            ]
            with_settings.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
            alone = typer.Typer(add_completion=False)
            alone.command()(with_settings)
            return list(typer.main.get_command(alone).params)

        def get_params(self, ctx: Any) -> list[Any]:
            return [*self.settings, *super().get_params(ctx)]

        def format_options(self, ctx: Any, formatter: Any) -> None:
            if names:  # few enough for one list
                super().format_options(ctx, formatter)
                return
            records = {
                str(option.name): option.get_help_record(ctx) for option in self.get_params(ctx)
            }
            rows = {name: record for name, record in records.items() if record is not None}
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
                if hasattr(
                    error, "possibilities"
                ):  # the parser's names for an option may be far away
                    names = [
                        flag.strip("-") for option in self.get_params(ctx) for flag in option.opts
                    ]
                    error.possibilities = [
                        f"--{name}" for name in near_names(error.option_name.strip("-"), names)
                    ]
                raise

        def invoke(self, ctx: Any) -> Any:
            given = {str(option.name): ctx.params.pop(str(option.name)) for option in self.settings}
            ctx.obj = {name: value for name, value in given.items() if value is not None}
            return super().invoke(ctx)

    return SettingsCommand


def _parameter(name: str, field: "FieldInfo", schema: dict[str, Any], of_task: bool) -> Parameter:
    flag = f"--{name.replace('_', '-')}"
    meaning = field.description or ""
    if field.annotation is bool:
        kind: Any = Annotated[bool | None, typer.Option(flag, help=meaning)]
    else:
        # As a default of the option it would stand in brackets of its own.
        shown = "" if field.default is None else f"  [default: {text_of(field.default)}]"
        meaning += "  [the task's]" if of_task else shown
        hidden = bool(schema.get("hidden"))
        option = typer.Option(flag, help=meaning, metavar=allowed(schema).split()[0], hidden=hidden)
        kind = Annotated[str | None, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def text_of(default: Any) -> str:
    """A default as it is written on the command line; a dash for None."""
    return (
        ",".join(map(str, default))
        if isinstance(default, tuple)
        else "-"
        if default is None
        else str(default)
    )


def allowed(schema: dict[str, Any]) -> str:
    """The values that a field's JSON schema allows, for a person."""
    schema = schema.get("anyOf", [schema])[0]
    if words := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return "|".join(words)
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [
        f"{sign} {schema[key]:g}"
        for key, sign in signs.items()
        if schema.get(key) not in (None, 2**31 - 1, 1e37)
    ]
    kind = {"integer": "N", "number": "X", "array": "A,B", "boolean": "true|false"}.get(
        schema["type"], "NAME"
    )
    return " ".join([kind, ", ".join(limits)]).rstrip()


def settings_from(
    kind: "type[AnySettings]",
    given: Mapping[str, Any],
    sets: Sequence[str] | None,
    config: Path | None,
    out: Path | None,
    resume: bool,
) -> "AnySettings":
    """The settings of a command from its options, checked against what its folder holds already."""
    given = _joined(given, sets or [])
    recorded = recorded_settings(out) if out else None
    held, mine = (
        next((key for key in _HOLDS if key in keys), None)
        for keys in (recorded or {}, kind.model_fields)
    )
    if held is not None and held != mine:
        raise DeltaflError(
            f"{out} holds {_HOLDS[held].format(out=quote(str(out)))}, or choose another --out"
        )
    if resume and out is None:
        raise DeltaflError("--resume needs --out DIR, the folder of the run to continue")
    if resume and recorded is None and not given and config is None:
        raise DeltaflError(f"there is no run in {out} to resume; leave out --resume to start one")
    grows = UNION & kind.model_fields.keys() and not (UNION | {"rounds"}).isdisjoint(given)
    if recorded is not None and not resume and not grows:
        raise DeltaflError(
            f"{out} already holds a run; add --resume to continue it, or choose another --out"
        )
    objects = (
        RunDirectory(out).environment().get("objects") if recorded is not None and out else None
    )
    if objects:
        raise DeltaflError(
            f"{out} was played from Python with {', '.join(objects)}: go on there with the same "
            "call of deltafl.compare"
            f" and out={str(out)!r}"
        )
    if recorded is None:
        if resume:
            logging.getLogger("deltafl").info(
                f"there is nothing to continue in {out}: it begins anew"
            )
        settings = make_settings(kind, given, config)
        refuse_ignored(settings, given)
        return settings
    now = (
        make_settings(kind, {**recorded, **given})
        if config is None
        else make_settings(kind, given, config)
    )
    return grown(make_settings(kind, recorded), now)


def _joined(given: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
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
