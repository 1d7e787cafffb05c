"""The state of a federation on disk: never seen half written, so that a killed server resumes from it.

::

    DIR/federation.json              clients (keys, sizes), the model's layout, the settings; names the other file
    DIR/federation-N.safetensors     model, scores, control variates, counts, buffers after N rounds
    DIR/federation.lock              held by the server that writes here, and released however it ends

A new pair becomes valid when the JSON file is renamed; the old tensors are deleted afterwards. With ``memory_path`` the
clients' updates are in a file elsewhere (``rules.ServerMemory``), and the tensors hold only those of the last round.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..errors import DeltaflError
from ..io import (
    flatten,
    note_round,
    noted_round,
    read_json,
    read_tensors,
    settled,
    unflatten,
    write_atomically,
    write_tensors,
    written,
)
from ..round import init_round
from .clients import ClientInfo, ClientRegistry
from .federation import Federation
from .rules import Rules

MARK = "federation.json"
_VERSION = 2
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
    except Timeout:
        raise DeltaflError(
            f"another server is using the state in {folder}; stop it first, or choose another state_path"
        ) from None
    except OSError as error:
        raise DeltaflError(f"cannot keep the state in {folder} ({error.strerror}); choose another state_path") from None
    with lock:
        yield


def save(folder: Path, federation: Federation) -> None:
    """Write the state after a round."""
    folder.mkdir(parents=True, exist_ok=True)
    state, memory = federation.current, federation.rules.memory
    tensors = f"federation-{state.round}.safetensors"
    rest = {_REST + name: array for name, array in federation.rest.items()}
    checksum = write_tensors(folder / tensors, {**dict(flatten(state)), **rest})
    mark = {
        "version": _VERSION,
        "round": state.round,
        "tensors": tensors,
        "checksum": checksum,
        "settings": _settings(federation.rules),
        "layout": _layout(federation),
        "clients": [
            {"key": key, **info._asdict()}
            for key, info in zip(federation.clients.keys, federation.clients.infos, strict=True)
        ],
        "memory": None if memory.folder is None else {"folder": memory.folder, "round": _memory_round(memory.folder)},
    }
    write_atomically(folder / MARK, json.dumps(mark, indent=1) + "\n")
    for old in folder.glob("federation-*.safetensors"):
        if old.name != tensors:
            old.unlink()
    _settle(federation)


def load(folder: Path, federation: Federation) -> bool:
    """Restore the saved state into a new federation; False if there is none.

    Raises:
        DeltaflError: If it was saved with other settings or for another model, or is damaged.
    """
    if not (folder / MARK).exists():
        return False
    try:
        _restore(folder, federation)
    except (KeyError, TypeError) as error:  # an edited mark
        raise DeltaflError(f"{folder / MARK} is damaged ({type(error).__name__}: {error}); {_CURE}") from None
    return True


def _restore(folder: Path, federation: Federation) -> None:
    mark = read_json(folder / MARK)
    if mark["version"] != _VERSION:
        raise DeltaflError(
            f"{folder / MARK} has version {mark['version']}; this deltafl reads version {_VERSION}: choose a new "
            "state_path"
        )
    before, now = mark["settings"], _settings(federation.rules)
    for name in now:
        if before[name] != now[name]:
            raise DeltaflError(
                f"the state in {folder} was saved with {name} = {before[name]}, now it is {now[name]}; write it as it "
                "was, or choose a new state_path"
            )
    if mark["layout"] != _layout(federation):
        raise DeltaflError(f"the state in {folder} belongs to a model with other arrays; choose a new state_path")
    clients = ClientRegistry(
        tuple(client["key"] for client in mark["clients"]),
        tuple(ClientInfo(client["num_examples"], tuple(client["aux"])) for client in mark["clients"]),
    )
    _find_memory(folder, federation, mark, len(clients.keys))
    arrays, _ = read_tensors(folder / mark["tensors"], _CURE, mark["checksum"])
    template = init_round(federation.rules.plan(clients.sizes, clients.aux), federation.params_d)
    rest = {name: arrays[_REST + name] for name in federation.rest}
    federation.restore(clients, unflatten(template, arrays), rest)
    _settle(federation)


def _find_memory(folder: Path, federation: Federation, mark: dict[str, Any], num_clients: int) -> None:
    """Point to the folder of the clients' updates; check that they belong to this state and fit."""
    rules = federation.rules
    if not rules.remembers:
        return
    if mark["memory"] is not None:
        place = mark["memory"]["folder"]
        rules = federation.rules = replace(rules, memory=replace(rules.memory, folder=place))
        # A server killed before or while it settled: the saved state has the missing rows.
        if _memory_round(place) not in (mark["memory"]["round"], mark["round"]):
            raise DeltaflError(
                f"the clients' updates in {place} do not belong to the state in {folder} after round {mark['round']}; "
                "put back copies of both that were made at the same time, or choose a new state_path"
            )
    rules.memory.require_room(num_clients, federation.layout.num_params, rules.n)


def _memory_round(folder: str) -> int | None:
    return noted_round(Path(folder))


def _settle(federation: Federation) -> None:
    """Write the updates that the saved state holds into the clients' file, if there is one."""
    folder = federation.rules.memory.folder
    if folder is not None:
        federation.state = settled(federation.current)
        note_round(Path(folder), federation.current.round)


def _layout(federation: Federation) -> list[Any]:
    return [[name, list(shape), dtype, kind] for name, shape, dtype, kind in federation.layout.entries]


def _settings(rules: Rules) -> dict[str, Any]:
    """The settings that a saved state depends on, as JSON; the cohort size may change between starts."""
    return {
        "sampler": written(rules.sampler),
        "estimator": rules.estimator,
        "server_optimizer": written(rules.server_optimizer),
        "weights": rules.weights,
        "seed": rules.seed,
        "aux": rules.aux,
        "norm_guard": rules.norm_guard,
        "memory_dtype": rules.memory.dtype,
        "memory_path": None if rules.memory.path is None else str(rules.memory.path),
    }
