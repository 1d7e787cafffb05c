"""A folder of runs goes on with the settings that it began with, and with more samplers, seeds or
rounds.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...calls import Named
from ...errors import DeltaflError, counted
from ...samplers.label import file_name, spelled
from ...store.own_python import files_named, only, split_name
from ...tasks.own import is_own
from ...types import Json
from ..settings import AnySettings, Settings, differing, make_settings
from .directory import recorded_settings, write_header, write_settings
from .own_code import Code, note_code, require_objects, require_same_code, with_objects


def continued(
    settings: AnySettings,
    out: Path,
    trust_code: bool = False,
    known: Code | None = None,
) -> tuple[AnySettings, AnySettings | None, Code]:
    """The settings of what is played in a folder now, those that it began with, None if nothing was
    begun, and the user's own code.

    It is the code ``known`` where a call plays several runs: what they do to it does not count.
    Unless ``trust_code``, the folder's own names of Python files count where ``settings`` name the
    same files.

    Raises:
        DeltaflError: If the folder was played with other settings, or other code of one name, or
            names code that may not run.
    """
    # First of all: to make settings is to try own code out.
    code = known or Code.of(settings)
    recorded = recorded_settings(out)
    if recorded is None:
        _require_once(settings.labels())
        _require_own_places(settings)
        return settings, None, code
    with only(None if trust_code else files_named(settings.model_dump())):
        require_objects(out, recorded, settings)
        before = make_settings(type(settings), with_objects(recorded, settings))
        settings = grown(before, settings)
        _require_once(label for label in settings.labels() if label not in before.labels())
        _require_own_places(settings)
        if known is None:
            code = code.and_of(settings)
        require_same_code(out, code, before, is_one_call=known is not None)
    return settings, before, code


def _require_once(labels: Iterable[str]) -> None:
    """Refuse one method in two spellings, of those that were not played here before."""
    first = dict[str, str]()
    for label in labels:
        other = first.setdefault(spelled(label), label)
        if other != label:
            raise DeltaflError(f"{label} and {other} are one method; name each once")


def _require_own_places(settings: Settings) -> None:
    """Refuse two methods whose runs would be in one place."""
    first = dict[str, str]()
    for label in settings.labels():
        other = first.setdefault(file_name(label), label)
        if other != label:
            raise DeltaflError(
                f"the runs of {label} and of {other} would both be called {file_name(label)}, "
                "which names no folders and few signs: rename a file or a value of one of them, "
                "or leave it out"
            )


def note_settings(
    out: Path,
    settings: Settings,
    before: Settings | None,
    data: Json,
    code: Code,
) -> None:
    """Write what a folder begins with, or goes on with."""
    if before is None:
        write_header(out, settings, data, code)
    elif before != settings:
        write_settings(out, settings)
        note_code(out, code)


def _spelled_as_before(before: Settings, now: Settings) -> dict[str, str]:
    """The names of files that name what they named before, and are spelled otherwise: as they were
    spelled.
    """
    names = ((key, old, new) for (key, old), (_, new) in zip(before, now, strict=True))
    return {key: old for key, old, new in names if _place(old) == _place(new) is not None}


def _place(name: Any) -> tuple[Path, str] | None:
    """File and function, if this is the name of a file of the user's own."""
    if not isinstance(name, str) or isinstance(name, Named) or not is_own(name):
        return None
    file, function = split_name(name)
    return file.resolve(), function


def grown(before: AnySettings, now: AnySettings) -> AnySettings:
    """The settings of what began with ``before`` and goes on with ``now``: samplers and seeds of
    both, more rounds.

    Other settings that change results, fewer rounds, and more that differ from those played at once
    are refused.
    """
    now = now.model_copy(update=_spelled_as_before(before, now) | now.spelled_as(before))
    for key, old, new in differing(before, now):
        if key != "rounds" or new < old:
            raise DeltaflError(
                f"the run was started with {key} = {old}, not {new}; leave the option out, or "
                "choose another --out"
            )
        if old % now.evaluate_every:
            raise DeltaflError(
                f"the run ended with an evaluation after {counted(old, 'round')}, not one of every "
                f"{now.evaluate_every}: to play {counted(new, 'round')}, choose another --out"
            )
    return now.with_those_of(before)
