"""The state of a federation on disk: one safetensors file, never seen half written, and the lock of its server.

With ``memory_path`` the clients' updates are in a file of their own, in a folder that the header names, and the state
holds only those of the last round. Both record their round: where an old copy of one was put back, the estimate would
count updates that nobody sent.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..errors import DeltaflError
from ..io import Array, read_tensors, write_tensors
from ..round import init_round
from ..scale.state_file import flatten, note_round, noted_round, owner, settled, unflatten
from .clients import ClientInfo
from .federation import Federation

FILE = "federation.safetensors"
_HEADER = "deltafl-federation"
_VERSION = 3
_REST = "rest."
_CURE = "put a copy of the folder in its place, or choose a new state_path"


@contextmanager
def sole_owner(folder: Path | None) -> Iterator[None]:
    """Lock the folder against other servers, which would overwrite this one's rounds; nothing without a folder."""
    if folder is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "federation.lock").acquire(timeout=0)
    except OSError as error:
        why = "another server is using it; stop that one, or" if isinstance(error, Timeout) else f"{error.strerror};"
        raise DeltaflError(f"cannot keep the state in {folder}: {why} choose another state_path") from None
    with lock:
        yield


def save(folder: Path, federation: Federation) -> None:
    """Write the state after a round."""
    folder.mkdir(parents=True, exist_ok=True)
    memory = federation.rules.plan.memory.folder
    header = {
        "version": _VERSION,
        "round": federation.current.round,
        "settings": _settings(federation),
        "layout": federation.layout.entries,
        "clients": [{"key": key, **info._asdict()} for key, info in federation.clients.items()],
        "memory": None if memory is None else {"folder": memory, "round": noted_round(Path(memory))},
    }
    rest = {_REST + name: array for name, array in federation.rest.items()}
    write_tensors(folder / FILE, {**dict(flatten(federation.current)), **rest}, {_HEADER: json.dumps(header)})
    _settle(federation)


def load(folder: Path, federation: Federation) -> bool:
    """Restore the saved state into a new federation; False if there is none."""
    if not (folder / FILE).exists():
        if (folder / "federation.json").exists():  # written before the state was one file
            raise DeltaflError(f"{folder} holds the state of an earlier version of deltafl; choose a new state_path")
        return False
    arrays, texts = read_tensors(folder / FILE, _CURE)
    try:
        _restore(folder, federation, json.loads(texts.get(_HEADER, "{}")), arrays)
    except DeltaflError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DeltaflError(f"{folder / FILE} is damaged; {_CURE}") from error
    _settle(federation)
    return True


def _restore(folder: Path, federation: Federation, header: dict[str, Any], arrays: dict[str, Array]) -> None:
    if header.get("version") != _VERSION:
        raise DeltaflError(f"{folder / FILE} is of another version of deltafl; choose a new state_path")
    for name, now in _settings(federation).items():
        before = header["settings"].get(name)  # None in a state that is older than the setting
        if before != now:
            raise DeltaflError(
                f"the state in {folder} was saved with {name} = {before}, now it is {now}; write it as it was, or "
                "choose a new state_path"
            )
    if header["layout"] != json.loads(json.dumps(federation.layout.entries)):
        raise DeltaflError(f"the state in {folder} belongs to a model with other arrays; choose a new state_path")
    if header["memory"] is not None:
        _find_memory(folder, federation, header["memory"], header["round"])
    clients = {entry["key"]: ClientInfo(entry["num_examples"], tuple(entry["aux"])) for entry in header["clients"]}
    federation.require_room(len(clients))
    federation.clients, federation.plan = clients, federation.rules.plan_for(clients)
    federation.rest = {name: arrays[_REST + name] for name in federation.rest}
    federation.state = unflatten(init_round(federation.plan, federation.params_d), arrays)


def _find_memory(folder: Path, federation: Federation, memory: dict[str, Any], round: int) -> None:
    """Point to the folder of the clients' updates, and check that they belong to this state."""
    plan = federation.rules.plan
    plan = replace(plan, memory=replace(plan.memory, folder=memory["folder"]))
    federation.rules = replace(federation.rules, plan=plan)
    # A server killed before or while it settled: the saved state has the missing rows.
    if noted_round(Path(memory["folder"])) not in (memory["round"], round):
        raise DeltaflError(
            f"the clients' updates in {memory['folder']} do not belong to the state in {folder} after round {round}: "
            "put back copies of both that were made at the same time, or choose a new state_path"
        )


def _settle(federation: Federation) -> None:
    """Write the updates that the saved state holds into the clients' file, if there is one."""
    folder = federation.rules.plan.memory.folder
    if folder is not None:
        federation.state = settled(federation.current)
        note_round(Path(folder), federation.current.round)


def _settings(federation: Federation) -> dict[str, Any]:
    """The settings that a saved state depends on, as JSON; the cohort size may change between starts."""
    rules = federation.rules
    texts, memory = owner(rules.plan), rules.plan.memory
    return {
        **{name: texts[name] for name in ("sampler", "estimator", "server_optimizer", "seed", "norm_guard")},
        "clip": texts.get("clip"),
        "weights": rules.weights,
        "max_ratio": rules.max_ratio,
        "identity": rules.identity,
        "aux": rules.aux,
        "memory_dtype": memory.dtype,
        "memory_path": None if memory.folder is None else str(Path(memory.folder).parent),
    }
