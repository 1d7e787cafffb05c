"""The state of a federation on disk: never seen half written, so that a killed server resumes from it.

::

    DIR/federation.safetensors   model, scores, control variates, counts, buffers; in its header, as JSON, the round,
                                 the clients (keys, sizes), the model's layout and the settings
    DIR/federation.lock          held by the server that writes here, and released however it ends

With ``memory_path`` the clients' updates are in a file of their own, in a folder that the header names, and the state
holds only those of the last round. A file and a state that do not belong together (an old copy of one was put back)
would make the estimate count updates that nobody sent, so both record their round.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..errors import DeltaflError
from ..io import read_tensors, write_tensors
from ..round import init_round
from ..scale.state_file import flatten, note_round, noted_round, owner, settled, unflatten
from .clients import ClientInfo, ClientRegistry
from .federation import Federation
from .rules import Rules

FILE = "federation.safetensors"
_HEADER = "deltafl-federation"
_VERSION = 3
_REST = "rest."
_CURE = "put a copy of the folder in its place, or choose a new state_path"


@contextmanager
def sole_owner(folder: Path | None) -> Iterator[None]:
    """Lock the folder against other servers, which would overwrite this one's rounds; does nothing without a folder.

    Raises:
        DeltaflError: If another server holds it, or it cannot be written.
    """
    if folder is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "federation.lock").acquire(timeout=0)
    except OSError as error:
        in_use = "another server is using it; stop that one, or"
        reason = in_use if isinstance(error, Timeout) else f"{error.strerror};"
        raise DeltaflError(f"cannot keep the state in {folder}: {reason} choose another state_path") from None
    with lock:
        yield


def save(folder: Path, federation: Federation) -> None:
    """Write the state after a round."""
    folder.mkdir(parents=True, exist_ok=True)
    clients, memory = federation.clients, federation.rules.plan.memory.folder
    header = {
        "version": _VERSION,
        "round": federation.current.round,
        "settings": _settings(federation.rules),
        "layout": _layout(federation),
        "clients": [{"key": key, **info._asdict()} for key, info in zip(clients.keys, clients.infos, strict=True)],
        "memory": None if memory is None else {"folder": memory, "round": noted_round(Path(memory))},
    }
    rest = {_REST + name: array for name, array in federation.rest.items()}
    write_tensors(folder / FILE, {**dict(flatten(federation.current)), **rest}, {_HEADER: json.dumps(header)})
    _settle(federation)


def load(folder: Path, federation: Federation) -> bool:
    """Restore the saved state into a new federation; False if there is none.

    Raises:
        DeltaflError: If it was saved with other settings or for another model, or is damaged.
    """
    if not (folder / FILE).exists():
        if (folder / "federation.json").exists():  # written before the state was one file
            raise DeltaflError(f"{folder} holds the state of an earlier version of deltafl; choose a new state_path")
        return False
    arrays, texts = read_tensors(folder / FILE, _CURE)
    header = json.loads(texts.get(_HEADER, "{}"))
    if header.get("version") != _VERSION:
        raise DeltaflError(f"{folder / FILE} is of another version of deltafl; choose a new state_path")
    before, now = header["settings"], _settings(federation.rules)
    for name in now:
        if before[name] != now[name]:
            raise DeltaflError(
                f"the state in {folder} was saved with {name} = {before[name]}, now it is {now[name]}; write it as it "
                "was, or choose a new state_path"
            )
    if header["layout"] != _layout(federation):
        raise DeltaflError(f"the state in {folder} belongs to a model with other arrays; choose a new state_path")
    keys, infos = zip(
        *((client["key"], ClientInfo(client["num_examples"], tuple(client["aux"]))) for client in header["clients"]),
        strict=True,
    )
    clients = ClientRegistry(keys, infos)
    _find_memory(folder, federation, header)
    federation.rules.require_room(len(keys), federation.layout.num_params)
    template = init_round(federation.rules.plan_for(clients), federation.params_d)
    rest = {name: arrays[_REST + name] for name in federation.rest}
    federation.restore(clients, unflatten(template, arrays), rest)
    _settle(federation)
    return True


def _find_memory(folder: Path, federation: Federation, header: dict[str, Any]) -> None:
    """Point to the folder of the clients' updates, and check that they belong to this state."""
    if header["memory"] is None:
        return
    plan, place = federation.rules.plan, header["memory"]["folder"]
    federation.rules = replace(federation.rules, plan=replace(plan, memory=replace(plan.memory, folder=place)))
    # A server killed before or while it settled: the saved state has the missing rows.
    if noted_round(Path(place)) not in (header["memory"]["round"], header["round"]):
        raise DeltaflError(
            f"the clients' updates in {place} do not belong to the state in {folder} after round {header['round']}; "
            "put back copies of both that were made at the same time, or choose a new state_path"
        )


def _settle(federation: Federation) -> None:
    """Write the updates that the saved state holds into the clients' file, if there is one."""
    folder = federation.rules.plan.memory.folder
    if folder is not None:
        federation.state = settled(federation.current)
        note_round(Path(folder), federation.current.round)


def _layout(federation: Federation) -> list[Any]:
    return [[name, list(shape), dtype, kind] for name, shape, dtype, kind in federation.layout.entries]


def _settings(rules: Rules) -> dict[str, Any]:
    """The settings that a saved state depends on, as JSON; the cohort size may change between starts."""
    texts, folder = owner(rules.plan), rules.plan.memory.folder
    return {
        **{name: texts[name] for name in ("sampler", "estimator", "server_optimizer", "seed", "norm_guard")},
        "weights": rules.weights,
        "identity": rules.identity,
        "aux": rules.aux,
        "memory_dtype": rules.plan.memory.dtype,
        "memory_path": None if folder is None else str(Path(folder).parent),
    }
