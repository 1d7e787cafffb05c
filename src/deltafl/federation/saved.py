"""The state of a federation on disk: one safetensors file, never seen half written, and the lock of
its server.

Beside it are the two good states before it, ``federation-1.safetensors`` and ``-2``: a federation
whose model is lost goes back to them, and a person may put one in the place of a file that is
damaged, which a checksum shows. All are for their owner alone.

With ``memory_path`` the clients' updates are in a file of their own, in a folder that the header
names, and the state holds only those of the last round (``store/folder.py``).
"""

import json
import os
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from socket import AF_UNIX, socket
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field, FiniteFloat

from ..errors import DeltaflError
from ..round import blank_state
from ..scale.named_arrays import named_arrays
from ..scale.rows import settled
from ..scale.sound import not_sound, restored_state
from ..state_file import owner
from ..store.files import make_folder, opened, remove
from ..store.folder import Note, owned, read_note, require_note, require_own, write_note
from ..store.lines import append_line, cut_back, lines_in
from ..store.machine import made_with, warn_of_other
from ..store.sealed import read_sealed, write_sealed
from ..store.values import checked, parsed
from ..types import LARGEST_AUX, NOBODY, Array, FloatArray, Json, RoundInfo
from .clients import ClientInfo
from .facts import FACTS
from .federation import KEPT, Federation
from .scales import ClientScale

#: The last state, and the good ones before it.
FILES = [
    "federation.safetensors",
    *(f"federation-{age}.safetensors" for age in range(1, KEPT)),
]
FILE = FILES[0]
#: A line for each round, of no client by name: what ``deltafl watch`` shows.
LOG = "rounds.jsonl"
_VERSION = 10
_Norm = Annotated[float, Field(ge=0, le=LARGEST_AUX)]


class Header(NamedTuple):
    """What a state says of itself beside its arrays."""

    version: int
    owner: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    round: int
    settings: Json
    layout: list[Any]
    frozen: str
    clients: Annotated[dict[str, Annotated[int, Field(ge=1, le=2**53)]], Field(min_length=1)]
    #: norm and first loss of a client, see ``ClientScale``
    scales: dict[str, tuple[_Norm, FiniteFloat]]
    memory: str | None
    note: Note | None
    made_with: dict[str, str]
    #: when a client was last there, see ``Federation.seen``
    seen: dict[str, Annotated[int, Field(ge=0, le=10**9)]]
    #: what each client said of itself, where it was asked (``facts.py``)
    strata: dict[str, str] | None = None
    costs: dict[str, float] | None = None
    #: how the user writes the sampler
    method: str | None = None


_REST = "rest."
_AUX = "aux_mk"


def sole_owner(folder: Path | None) -> AbstractContextManager[None]:
    """Keep other servers out of the folder, where they would overwrite this one's rounds; nothing
    without a folder.
    """
    if folder is None:
        return nullcontext()
    make_folder(folder, private=True)
    # In the folder: what is beside a mounted one is not shared.
    return owned(folder, folder / "federation.lock", "state_path")


@contextmanager
def only_copy(folder: Path | None, owner: str) -> Iterator[None]:
    """Refuse to go on with a copy of a state while this machine goes on with another one, where
    the system has names that end with their process.
    """
    if folder is None or sys.platform != "linux":
        yield
        return
    with socket(AF_UNIX) as held:
        try:
            held.bind(f"\0deltafl-{owner}")
        except OSError:
            raise DeltaflError(
                f"another server of this machine goes on with a copy of {folder}, and the two "
                "would part; stop it, or choose another state_path"
            ) from None
        yield


def save(folder: Path, federation: Federation, anew: bool = False) -> None:
    """Write the state after a round; ``anew`` deletes the states before it, which know clients
    that are forgotten.
    """
    make_folder(folder, private=True)
    memory = federation.rules.plan.memory.folder
    header = Header(
        version=_VERSION,
        owner=federation.owner,
        round=federation.current.round,
        settings=_settings(federation),
        layout=list(federation.layout.entries),
        frozen=federation.frozen_digest,
        clients={key: info.num_examples for key, info in federation.clients.items()},
        scales={**federation.scales.known},
        memory=memory,
        note=None if memory is None else read_note(Path(memory)),
        made_with=made_with(),
        seen=federation.seen,
        method=federation.rules.plan.method,
        **{
            FACTS[name].setting: {
                key: getattr(info, name) for key, info in federation.clients.items()
            }
            for name in federation.rules.wanted
        },
    )
    arrays = {
        **dict(named_arrays(federation.current)),
        **{_REST + name: array for name, array in federation.rest.items()},
        _AUX: _aux_of(federation.clients.values()),
    }
    if anew:
        for name in FILES[1:]:
            remove(folder / name)
    elif memory is None and federation.scales.sound:
        _keep_last(*(folder / name for name in FILES))
    write_sealed(folder / FILE, arrays, header._asdict())
    # Only now: the file has these rows, so that older ones may be written over.
    _settle(federation)


def note_round(folder: Path, info: RoundInfo) -> None:
    """Write down what happened in a round; of two lines of one round, as where a federation went
    back in its own process, the last counts.
    """
    line = info._asdict() | {"round": info.round + 1}
    append_line(folder / LOG, line, private=True)


def _forget_later(folder: Path, round: int) -> None:
    """Cut off what the log has of rounds after the saved one: they are played again."""
    file = folder / LOG
    if not file.exists():
        return
    length = 0
    with opened(file) as log:
        for text in lines_in(log, file):
            if not text.endswith(b"\n"):  # cut off as it was written
                break
            number = _round_noted(text, str(file))
            if number is None:
                return
            if number > round:
                break
            length += len(text)
    if length < file.stat().st_size:
        cut_back(file, length)


def _round_noted(text: bytes, where: str) -> int | None:
    """The round of a line that a federation wrote; None for a damaged one, or one of a simulated
    run, whose file is not ours to cut.
    """
    with suppress(DeltaflError):
        match parsed(text, where):
            case {"round": int(number), "num_selected": _, **other} if "cohort" not in other:
                return number
    return None


def _keep_last(last: Path, before: Path, oldest: Path) -> None:
    """Keep the state of the round before, which has proved good, beside the one that takes its
    place.
    """
    _undo_keeping(last, before)
    with suppress(OSError):  # there is none yet; a file system without links keeps none
        before.replace(oldest)
    with suppress(OSError):
        # A second name is no copy: ``write_sealed`` puts a new file under the first one.
        os.link(last, before)


def _undo_keeping(last: Path, before: Path) -> None:
    """A server that was killed before it wrote leaves its last state under two names."""
    if before.exists() and last.exists() and before.samefile(last):
        remove(before)


def load(folder: Path, federation: Federation) -> bool:
    """Restore the saved state into a new federation; False if there is none."""
    if not (folder / FILE).exists():
        before = next((name for name in FILES[1:] if (folder / name).exists()), None)
        if before is not None:
            raise DeltaflError(
                f"{folder} has no {FILE}; rename {before}, or choose a new state_path"
            )
        _forget_later(folder, 0)
        return False
    _undo_keeping(folder / FILE, folder / FILES[1])
    # The oldest first, as a federation keeps them.
    for name in reversed(FILES[1:]):
        with suppress(DeltaflError):  # there is none, or one of other settings, or damaged
            _restore(folder / name, federation)
            federation.keep()
    # Each takes the place of the one before: the state to go on with comes last.
    header = _restore(folder / FILE, federation)
    warn_of_other(header.made_with, made_with(), str(folder / FILE))
    _forget_later(folder, header.round)
    _settle(federation)
    return True


def _restore(file: Path, federation: Federation) -> Header:
    copy = FILES[1] if (file.parent / FILES[1]).exists() else "a copy of the folder"
    cure = f"put {copy} in its place, or choose a new state_path"
    arrays, found = read_sealed(file, cure, mapped=True)
    if found.get("version") != _VERSION:
        raise DeltaflError(f"{file} is of another version of deltafl; choose a new state_path")
    header = checked(Header, found, str(file), cure)
    _take(file, federation, header, arrays)
    return header


def _take(
    file: Path,
    federation: Federation,
    header: Header,
    arrays: dict[str, Array],
) -> None:
    folder = file.parent
    # Nobody has written a seed, so it is no setting that differs: draws go on as they began.
    if federation.rules.own_seed:
        plan = replace(federation.rules.plan, seed=_seed_of(header))
        federation.rules = replace(federation.rules, plan=plan)
    method = federation.rules.plan.method
    for name, now in _settings(federation).items():
        before = header.settings.get(name)
        if before != now:
            what = {
                "seed": "another seed",
                "sampler": f"the sampler {header.method or before}, now it is {method}",
            }.get(name, f"{name} = {before}, now it is {now}")
            cure = "write it as it was, or choose a new state_path"
            raise DeltaflError(f"the state in {folder} was saved with {what}; {cure}")
    # As JSON has it, with lists for tuples.
    described = json.loads(json.dumps(federation.layout.entries))
    # Of two lists of different lengths the first array that one of them lacks is named.
    for before, now in zip_longest(header.layout, described):
        if before != now:
            raise DeltaflError(
                f"the state in {folder} belongs to a model with other arrays, {before} where there "
                f"is now {now}; give that model, with the same buffers, local, trainable and tied, "
                "or choose a new state_path"
            )
    if header.frozen != federation.frozen_digest:
        raise DeltaflError(
            f"the state in {folder} was trained beside other frozen arrays; give the base model "
            "that it had, or choose a new state_path"
        )
    if header.memory is not None:
        _find_memory(folder, federation, header)
    aux_mk = arrays.get(_AUX, NOBODY)
    rest = {name: arrays.get(_REST + name) for name in federation.rest}
    whole = {name: array for name, array in rest.items() if array is not None}
    fault = federation.layout.value_fault(whole)
    if aux_mk.ndim != 2 or len(aux_mk) != len(header.clients) or aux_mk.dtype != np.float64:
        fault = f"{_AUX} has no row for each client"
    if len(whole) < len(rest):
        fault = "an array of the model is missing"
    if not np.array_equal(arrays.get("state.round", NOBODY), header.round):
        fault = "its rounds contradict each other"
    if fault is not None:
        raise not_sound(fault)
    clients = _clients_of(header, aux_mk, federation.rules.wanted)
    federation.require_room(len(clients))
    if federation.kept and header.owner != federation.owner:
        raise DeltaflError(
            f"{folder / FILE} is of another federation than the states beside it; put its own back"
        )
    federation.owner = header.owner
    federation.scales.known = {key: ClientScale(*scale) for key, scale in header.scales.items()}
    federation.seen = header.seen
    federation.clients = clients
    federation.plan = federation.rules.plan_for(clients)
    # In the order of bytes that the model has, which no file keeps.
    federation.rest = {
        name: array.astype(federation.rest[name].dtype, copy=False) for name, array in whole.items()
    }
    template = blank_state(federation.plan, federation.params_d)
    federation.state = restored_state(federation.plan.sampler, template, arrays)


def _clients_of(
    header: Header,
    aux_mk: FloatArray,
    wanted: Json,
) -> dict[str, ClientInfo]:
    """What clients reported."""
    clients = {
        key: ClientInfo(size, () if np.isnan(aux).any() else tuple(aux.tolist()))
        for (key, size), aux in zip(header.clients.items(), aux_mk, strict=True)
    }
    for name, fact in FACTS.items():
        said = getattr(header, fact.setting) or {}
        asked = clients.keys() if name in wanted else set[str]()
        if said.keys() != asked or any(fact.fault(one, wanted[name]) for one in said.values()):
            raise DeltaflError(
                f"the saved state has clients of other {fact.setting} than the setting "
                f"{fact.setting} wants; write it as it was, or choose a new state_path"
            )
        for key, one in said.items():
            clients[key] = clients[key]._replace(**{name: one})
    return clients


def _aux_of(infos: Collection[ClientInfo]) -> FloatArray:
    """What clients reported beside their sizes, a row each; NaN for one that has not answered a
    census.
    """
    missing = (float("nan"),) * max((len(info.aux) for info in infos), default=0)
    return np.array([info.aux or missing for info in infos], np.float64)


def _find_memory(folder: Path, federation: Federation, header: Header) -> None:
    """Point to the folder of the clients' updates, and check that they belong to this state."""
    plan = federation.rules.plan
    memory = Path(str(header.memory))
    require_own(memory, Path(str(plan.memory.folder)).parent)
    plan = replace(plan, memory=replace(plan.memory, folder=str(memory)))
    federation.rules = replace(federation.rules, plan=plan)
    now = Note(header.round, header.owner)
    require_note(memory, header.note, now, f"the state in {folder}")


def _settle(federation: Federation) -> None:
    """Write the updates that the saved state holds into the clients' file, if there is one."""
    folder = federation.rules.plan.memory.folder
    if folder is not None:
        federation.state = settled(federation.current)
        write_note(Path(folder), Note(federation.current.round, federation.owner))


def _seed_of(header: Header) -> int:
    seed = str(header.settings.get("seed"))
    if not re.fullmatch(r"\d{1,30}", seed):
        raise not_sound(f"its seed is {seed:.60}")
    return int(seed)


def _settings(federation: Federation) -> Json:
    """The settings that a saved state depends on, as JSON; the cohort size may change between
    starts, without dp.
    """
    rules = federation.rules
    texts = owner(rules.plan)
    memory = rules.plan.memory
    # Privacy counts on the rate at which clients are drawn.
    rate = rules.plan.n / rules.min_clients if rules.plan.part("dp") else None
    return {
        **{name: texts[name] for name in ("sampler", "estimator", "seed")},
        **rules.plan.part_texts,
        "n / min_clients": rate,
        "weights": rules.weights,
        "max_ratio": rules.max_ratio,
        "identity": rules.identity,
        "aux": rules.aux,
        "memory_dtype": memory.dtype,
        "memory_path": None if memory.folder is None else str(Path(memory.folder).parent),
    }
