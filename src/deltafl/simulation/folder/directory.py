"""The files of a run: plain text that others can read, and checkpoints from which a run continues.

::

    DIR.lock                    while a process plays the run
    DIR/config.toml             every setting that was used
    DIR/environment.json        versions and hardware, and the name of the data
    DIR/rounds.jsonl            one line a round: cohort, estimate, evaluation; the same bytes for
                                the same settings
    DIR/timings.jsonl           one line a round: wall clock
    DIR/checkpoint.safetensors  the last good state, with the settings, and the lengths and
                                checksums of the files above at that moment, and of clients.json
                                when the run has ended
    DIR/clients.json            at the end of the run: each client's size, and its accuracy with
                                each of the last models
    DIR/census.safetensors      every client's answer, if the run began with a census
    DIR/suspect.safetensors     the model of a run with a suspect end (server/watch.py); its last
                                checkpoint is older

A checkpoint takes the place of the last one in one step. Lines after it belong to rounds that the
next start plays again: they are cut off, so nothing is recorded twice or half. All that it counts
on is on the disk by then (fsync); what does not fit it, because it is damaged, edited or of another
run, is refused. Checkpoints and memories are for their owner alone (0600).
"""

import atexit
import json
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from functools import partial
from itertools import chain, count
from pathlib import Path

import numpy as np
import tomli_w
from typing_extensions import TypedDict

from ...errors import DeltaflError, counted, printable
from ...plan import RoundState
from ...samplers.base import Sampler
from ...scale.named_arrays import named_arrays
from ...scale.rows import row_files, settled
from ...scale.sound import restored_state
from ...store.files import (
    make_folder,
    make_new_folder,
    name_for_file,
    remove,
    remove_empty,
    with_home,
    write_atomically,
)
from ...store.folder import Note, new_name, owned, read_note, require_note, require_own, write_note
from ...store.lines import NOTHING, append_line, cut_back, last_line, read_lines, seal_of, sync
from ...store.sealed import read_array, write_sealed
from ...store.values import checked, read_toml
from ...tasks.own import short_name
from ...types import AnyPath, Array, FloatArray, Json
from ..distributed import ALONE, ProcessGroup
from ..rest import LOCAL
from ..settings import RunSettings, Settings, differing
from .checkpoint import (
    CURE,
    FILE,
    Checkpoint,
    change_checkpoint,
    checkpoint_arrays,
    read_checkpoint,
)
from .clients import CLIENTS
from .lines import KINDS, Count, RoundLine
from .own_code import Code, objects_of, require_same_model
from .provenance import environment, noted

LINE_FILES = tuple(KINDS)
#: Files that stay as they are when the run has begun.
CENSUS = "census.safetensors"
_FIXED = ("environment.json", "engine.json", CENSUS)
SUSPECT = "suspect.safetensors"
#: Which command began what a folder holds, by the first of these that is among its settings: a
#: folder of ``tune`` has samplers, too.
_BEGAN = {"tuning_seeds": "tune", "goal": "plan", "sampler": "run", "samplers": "compare"}
#: Within a folder of ``deltafl tune``: the comparison with the rates found.
COMPARED = "comparison"


def locked(folder: Path, seconds: float = 0) -> AbstractContextManager[None]:
    """Wait some seconds for other processes, then keep them from playing in a folder."""
    # Not ``resolve``, which fails where links lead in a circle.
    place = Path(os.path.realpath(folder))
    if place.is_file():
        raise DeltaflError(f"{folder} is a file; choose another --out")
    # Beside the folder, which a refused run must not make.
    return owned(folder, Path(f"{place}.lock"), "--out", seconds)


def new_folder(
    command: str,
    task: str,
    at_end: Callable[[Callable[[], None]], object] = atexit.register,
) -> Path:
    """A folder of its own below ``runs`` for results that were given no place.

    It is made at once, or others that begin in the same second would take its name. What is still
    empty at the end is removed, that of this process or of what ``at_end`` adds a call to.
    """
    about = name_for_file(short_name(task), limit=60)
    name = f"{command}-{about}-{datetime.now():%Y%m%d-%H%M%S}"
    runs = Path("runs")
    make_folder(runs)
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    folder = make_new_folder(map(runs.joinpath, names))
    # The last call that is added is the first.
    for empty in (runs, folder):
        at_end(partial(remove_empty, empty.absolute()))
    return folder


def write_header(
    path: Path,
    settings: Settings,
    data: Json | None = None,
    code: Code | None = None,
) -> None:
    """Write environment, with ``Task.data``, and then the settings, which say that something was
    started here.
    """
    make_folder(path)
    given = settings.model_dump()
    own_code = code or Code.of(settings)
    own = {"objects": [*objects_of(given)], "code": own_code.part(settings)}
    known = {
        **environment(),
        **{key: names for key, names in own.items() if names},
        # From the folder, so that both may be moved together.
        "directory": os.path.relpath(Path.cwd(), path.resolve()),
        **(data or {}),
    }
    write_atomically(path / "environment.json", json.dumps(known, indent=1) + "\n")
    write_settings(path, settings)


def write_settings(path: Path, settings: Settings) -> None:
    """Write the settings of what is played in a folder."""
    write_atomically(
        path / "config.toml",
        tomli_w.dumps(settings.model_dump(exclude_none=True)),
    )


class Names(TypedDict, total=False):
    """What is looked at in settings before all of them are checked."""

    task: str
    sampler: str
    samplers: list[str]
    metric: list[str]
    seeds: list[int]
    rounds: Count
    sample: Count


def recorded_settings(path: Path) -> Json | None:
    """The settings recorded in a folder; None if nothing was started there."""
    config = path / "config.toml"
    if not config.exists():
        return None
    found = read_toml(config)
    return found | checked(Names, found, str(config), "put it right, or choose another folder")


def began_by(settings: Collection[str]) -> str | None:
    """The command that began a folder with such settings; None if they are of none."""
    return next((command for key, command in _BEGAN.items() if key in settings), None)


class StopRun(Exception):
    """Raised by a callback, it ends a run with the round that has just been played:
    ``raise StopRun("why")``.

    ``rounds.jsonl``, the record and the report say why.
    """

    def line(self) -> Json:
        """What the run's last line has."""
        return {"stopped": printable(self, limit=300) or "a callback ended it"}


class DivergedError(DeltaflError, StopRun):
    """A run has diverged and was ended.

    Attributes:
        round: The round in which it was noticed, counted from 1.
        kept: The round whose model is kept; 0 is the initial model.
        why: Symptom and likely cause, one sentence without its full stop.
    """

    def __init__(self, round: int, kept: int, why: str) -> None:
        super().__init__(f"diverged in round {round}: {why}; the state of round {kept} is kept")
        self.round = round
        self.kept = kept
        self.why = why

    def line(self) -> Json:
        """What the run's last line has."""
        return {"diverged": {"why": self.why, "kept": self.kept}}


class RunDirectory:
    """Writes and reads the files of one run in a folder. A damaged file is a ``DeltaflError``
    with its name.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path = with_home(path)
        self._memory: Path | None = None  #: see ``memory_folder``

    def start(
        self,
        settings: Settings,
        data: Json | None = None,
        code: Code | None = None,
    ) -> None:
        """Write what is known before the first round, unless the folder holds rounds: nothing is
        erased.
        """
        cure = "whose config.toml is missing; put that back, or choose another folder"
        for name in (*LINE_FILES, FILE):
            path = self.path / name
            # An empty file, as a killed process may leave it, holds no rounds.
            if path.exists() and path.stat().st_size > 0:
                raise DeltaflError(f"{path} belongs to another run, {cure}")
        make_folder(self.path)
        for name in LINE_FILES:
            cut_back(self.path / name, 0)
        write_header(self.path, settings, data, code)

    def environment(self) -> Json:
        """Versions, hardware and data, as they were when the run was started."""
        missing = {"data": "unknown", "data_crc32": ""}
        return missing | noted(self.whole("environment.json"))

    def append(
        self,
        round_line: Json,
        timing_line: Json,
    ) -> None:
        """Add one round."""
        for name, line in zip(LINE_FILES, (round_line, timing_line), strict=True):
            append_line(self.path / name, line)
        ends = {"diverged", "suspect"} & round_line.keys()
        if ends and (self.path / FILE).exists():  # no other checkpoint will hold these lines
            change_checkpoint(self.path, ended=self._seals((*LINE_FILES, CLIENTS)))

    def lines(self, name: str) -> Iterator[Json]:
        """The lines of ``rounds.jsonl`` or ``timings.jsonl``, one by one; an error if they are
        not as written.
        """
        return read_lines(self.whole(name), KINDS[name], CURE)

    def whole(self, name: str) -> Path:
        """A file of the folder; an error if it is not as the last checkpoint has it."""
        mark = read_checkpoint(self.path)
        if mark is not None:
            mark.require(self.path / name)
        return self.path / name

    def last_line(self) -> Json:
        """The last line of ``rounds.jsonl``; empty if there is none, or it was cut off as it was
        written: then the run goes on from its checkpoint.
        """
        line, timing = (last_line(self.path / name, kind, CURE) for name, kind in KINDS.items())
        # A process that was killed between the two lines has left a round without its time.
        if line.get("round") != timing.get("round"):
            return {}
        mark = read_checkpoint(self.path)
        log = LINE_FILES[0]
        if mark is not None and log in mark.ended and not mark.is_whole(self.path / log):
            return {}
        if mark is not None and line.get("round", mark.round) < mark.round:
            raise DeltaflError(f"{self.path / FILE} is of a later round than its lines: {CURE}")
        return line

    def ending(self) -> str | None:
        """How the run ended, if it diverged or looked wrong when it was over, as a sentence
        without its full stop.
        """
        last = self.last_line()
        if "diverged" in last:
            return str(DivergedError(last["round"], **last["diverged"]))
        if "suspect" not in last:
            return None
        ended = last["suspect"]
        return (
            f"has a suspect end after {counted(last['round'], 'round')}: {ended['why']}; the last "
            f"good state, of round {ended['kept']}, is kept, and the model as it ended beside it"
        )

    def is_finished(self, rounds: int) -> bool:
        """Whether the run has played all of its rounds, or has ended before: it diverged, or a
        callback ended it.
        """
        mark = read_checkpoint(self.path)
        last = self.last_line()
        if mark is None or mark.round >= rounds or "diverged" in last:
            return mark is not None
        is_over = "stopped" in last or last.get("round", 0) >= rounds
        # With a suspect end the last checkpoint is an older one; else it is that of the last round.
        return is_over and ("suspect" in last or mark.round == last["round"])

    def num_clients(self) -> int:
        """The number of clients, by the last checkpoint; 0 if there is none."""
        if not (self.path / FILE).exists():
            return 0
        return read_array(self.path / FILE, CURE, "state.selected_m").size

    def require_same_data(self, now: Json) -> None:
        """Refuse other data, or another model, than those that the folder records."""
        after = now["data_crc32"]
        # A record without a checksum cannot be compared.
        known = self.environment()
        before = known["data_crc32"] or after
        if before != after:
            raise DeltaflError(
                f"the data of {self.path} are not those it began with (checksum {before}, now "
                f"{after}): put the old "
                "ones back, or run it again in another folder"
            )
        require_same_model(self.path, known.get("model", {}), now["model"])

    def save(self, state: RoundState, is_last: bool = False) -> RoundState:
        """Write a checkpoint after the rounds appended so far, the one that ends the run if
        ``is_last``; returns the state to go on with.
        """
        before = read_checkpoint(self.path)
        if before is None:
            before = Checkpoint(
                0,
                secrets.token_hex(8),
                recorded_settings(self.path) or {},
                {},
                {},
            )
        mark = before._replace(
            round=state.round,
            files=self._seals((*LINE_FILES, *_FIXED), before),
            # Before, it is written again after every round.
            ended=self._seals([CLIENTS]) if is_last else {},
        )
        if self._memory is not None:
            # The rows in the folder are still those of the checkpoint before, and so is their note.
            mark = mark._replace(
                memory=str(self._memory),
                note=read_note(self._memory),
            )
        write_sealed(self.path / FILE, dict(named_arrays(state)), mark._asdict())
        # The run has gone on and its end looks sound.
        remove(self.path / SUSPECT)
        # The file has the rows from here on, and they may take the place of older ones.
        following: RoundState = settled(state)
        if self._memory is not None:
            write_note(self._memory, Note(mark.round, mark.run))
        return following

    def _seals(
        self,
        names: Iterable[str],
        before: Checkpoint | None = None,
    ) -> Json:
        """Bring the files that are there to the disk; their seals, reading only what was added to
        those ``before``.
        """
        known = before.files if before else {}
        there = [name for name in names if (self.path / name).exists()]
        for name in there:
            sync(self.path / name)
        return {
            name: seal_of(
                self.path / name,
                known.get(name, NOTHING),
            )
            for name in there
        }

    def save_suspect(self, state: RoundState) -> None:
        """Write the model of a run with a suspect end, beside the last checkpoint, which stays."""
        model = {"params_d": np.asarray(state.params_d), **dict(named_arrays(state.rest, "rest"))}
        write_sealed(self.path / SUSPECT, model)

    def save_settings(self, settings: Settings) -> None:
        """Write other settings than the run began with: it goes on with more rounds."""
        if (self.path / FILE).exists():
            now = settings.model_dump(mode="json", exclude_none=True)
            change_checkpoint(self.path, settings=now)
        write_settings(self.path, settings)

    def require_settings(self, now: RunSettings, rounds: int | None = None) -> None:
        """Refuse settings that are not those of the checkpoint: then ``config.toml`` was edited, or
        is another run's.

        ``rounds``, if it is given, is what ``config.toml`` says, from where the run may grow.
        """
        mark = read_checkpoint(self.path)
        if mark is None:
            return
        # Resolved when they were written.
        before = checked(RunSettings, mark.settings, str(self.path / FILE), CURE)
        for key, old, new in differing(before, now):
            if key != "rounds" or rounds not in (None, old):
                raise DeltaflError(
                    f"{self.path / 'config.toml'} or what is asked for has {key} = {new}, and the "
                    "checkpoint beside it "
                    f"{old}: put {key} = {old} back, or choose another folder"
                )

    def saved(self) -> tuple[int, dict[str, Array]] | None:
        """Round and arrays of the last checkpoint, which is only read; None if there is none."""
        mark = read_checkpoint(self.path)
        if mark is None:
            return None
        return mark.round, checkpoint_arrays(self.path)

    def load(
        self,
        sampler: Sampler,
        template: RoundState,
        group: ProcessGroup = ALONE,
    ) -> RoundState:
        """The state of the last checkpoint (the template itself if there is none); later lines are
        cut off.

        After an error nothing is cut off.
        """
        arrays = group.from_first(self._read_all)
        state = template
        if arrays is not None:
            state = settled(restored_state(sampler, template, arrays))
        if group.is_first:
            self._cut_off()
        return state

    def save_census(self, answer_mk: FloatArray) -> None:
        """Keep every client's answer, for a resume; it counts from the first checkpoint on."""
        write_sealed(self.path / CENSUS, {"answer_mk": answer_mk})

    def census(self) -> FloatArray | None:
        """Every client's answer; None if there is no checkpoint, so that the census is taken
        again.
        """
        if read_checkpoint(self.path) is None:
            return None
        return read_array(self.whole(CENSUS), CURE, "answer_mk")

    def _read_all(self) -> dict[str, Array] | None:
        """The arrays of the checkpoint, if everything beside it belongs to it."""
        mark = read_checkpoint(self.path)
        if mark is None:
            # Round 0 alone is what a start leaves that was cut short.
            if self.last_line().get("round"):
                raise DeltaflError(f"{self.path} has rounds and no {FILE}: {CURE}")
            return None
        if self._memory is not None:
            now = Note(mark.round, mark.run)
            require_note(
                self._memory,
                mark.note,
                now,
                f"the last checkpoint of {self.path}",
            )
        for name in mark.files:
            # As of the checkpoint: later lines may be broken, for they will be cut off.
            mark._replace(ended={}).require(self.path / name)
        arrays = checkpoint_arrays(self.path)
        lines = mark.files.get(LINE_FILES[0], NOTHING)
        last = last_line(self.path / LINE_FILES[0], RoundLine, CURE, lines.length)
        # Two files that were put back from different days would go on as if they were one run.
        same_line = last.get("round", mark.round) == mark.round
        same_state = np.array_equal(arrays.get("state.round", -1), mark.round)
        if not same_line or not same_state or not {*LINE_FILES} <= mark.files.keys():
            raise DeltaflError(f"{self.path / FILE} is of another round than its lines: {CURE}")
        return arrays

    def _cut_off(self) -> None:
        mark = read_checkpoint(self.path)
        for name in LINE_FILES:
            end = mark.files[name] if mark else NOTHING
            cut_back(self.path / name, end.length)
        if mark is None:
            return
        # The lines that it has sealed are cut off by now.
        if LINE_FILES[0] in mark.ended:
            change_checkpoint(self.path, ended={})
        if self._memory is not None:
            write_note(self._memory, Note(mark.round, mark.run))

    def memory_folder(self, memory_path: str | None) -> Path | None:
        """The folder of this run alone in ``memory_path``, the same after a resume; None without
        one.
        """
        if memory_path is None:
            return None
        within = Path(memory_path).absolute()
        folder = within / new_name(self.path.name)
        mark = read_checkpoint(self.path)
        if mark is not None:
            # A checkpoint may come from anybody: what it names is checked.
            folder = Path(str(mark.memory))
            require_own(folder, within)
        self._memory = folder
        return folder

    def delete(self) -> None:
        """Delete the run, and what it kept in its memory's folder: the files that this library
        writes, no others.
        """
        mark = read_checkpoint(self.path)
        memory = self._memory
        if memory is not None and mark is not None:
            note = read_note(memory)
            # Another run may have taken the folder since.
            if note is not None and note.owner == mark.run:
                local = memory / LOCAL
                _delete(local, row_files(local))
                _delete(memory, [*row_files(memory), memory / "round"])
        own = (*LINE_FILES, *_FIXED, "config.toml", CLIENTS, SUSPECT, FILE)
        _delete(
            self.path,
            [self.path / f"{name}{end}" for name in own for end in ("", ".part")],
        )


def _delete(folder: Path, files: Iterable[Path]) -> None:
    """Delete files, and their folder unless it holds others."""
    for file in files:
        remove(file)
    remove_empty(folder)


def refusals(folder: AnyPath) -> list[tuple[int, int, str, bool]]:
    """Replies refused in a run: the round, the client, the reason, and whether all were."""
    return [
        (line["round"], client, reason, not line.get("num_responded"))
        for line in RunDirectory(folder).lines("rounds.jsonl")
        for client, reason in line.get("rejected", [])
    ]
