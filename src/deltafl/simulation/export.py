"""The model of a run as a file for PyTorch: the state dict of the task's module, buffers
included; local arrays are the clients' weighted mean.
"""

import io
from pathlib import Path
from typing import Any

from ..errors import DeltaflError, counted
from ..model.arrays import NamedArrays
from ..plan import saved_model
from ..scale.sound import restored_part
from ..store.files import make_folder, with_home, write_atomically
from ..store.own_python import only, working_in
from ..store.sealed import write_sealed
from ..store.values import checked
from ..types import AnyPath, Params
from .folder.checkpoint import FILE
from .folder.directory import CENSUS, SUSPECT, RunDirectory, recorded_settings
from .folder.own_code import where_it_began
from .rest import RestOfModel, local_rows
from .runner import new_model
from .settings import RunSettings
from .setup import task_of
from .training import torch
from .training.tensors import ModelTensors

SUFFIXES = (".safetensors", ".pt")
#: What a run keeps in its folder under a name that a model could have.
_OWN = (FILE, CENSUS, SUSPECT)
#: Types that NumPy does not have: as safetensors calls them, and whole numbers of their width.
_AS_BITS = {
    torch.bfloat16: ("BF16", torch.int16),
    torch.float8_e4m3fn: ("F8_E4M3", torch.int8),
    torch.float8_e5m2: ("F8_E5M2", torch.int8),
}


def export_model(folder: AnyPath, to: AnyPath, trust_code: bool = False) -> int:
    """Write the model of a run's last checkpoint; returns the checkpoint's round.

    Args:
        folder: The folder of a run, or of one run of a comparison; it may be unfinished, and is not
            changed.
        to: ``FILE.safetensors``, or ``FILE.pt`` for ``torch.load``; a file that is there is
            replaced, but no file of a run.
        trust_code: Whether Python files that the folder names may be imported: a task of your own
            has a model that only its code knows.

    Raises:
        DeltaflError: If the folder holds no run with a checkpoint, or names code that may not run,
            or the file's name ends in something else, or is that of a run's own file.

    Example::

        export_model("my-run", "model.safetensors")
        model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
    """
    folder = with_home(folder)
    to = with_home(to)
    if to.suffix not in SUFFIXES:
        raise DeltaflError(f"cannot export to {to}: the file must end in {' or '.join(SUFFIXES)}")
    real = to.resolve()
    if real.name in _OWN and (real.parent / "config.toml").exists():
        raise DeltaflError(
            f"cannot export to {to}: a run keeps its own {real.name} there; write another name, "
            "such as model.safetensors"
        )
    # A comparison has several models, of which none is the one.
    runs = sorted(path.parent for path in folder.glob("**/runs/*/config.toml"))
    if runs:
        raise DeltaflError(
            f"{folder} holds {counted(len(runs), 'run')}; name one, such as {runs[0]}"
        )
    directory = RunDirectory(folder)
    recorded = recorded_settings(folder)
    found = directory.saved()
    if recorded is None or found is None:
        raise DeltaflError(
            f"{folder} holds no run with a checkpoint; name the folder of one, its --out"
        )
    objects = directory.environment().get("objects", [])
    for name in (recorded.get("task"), f"partition={recorded.get('partition')}"):
        if name in objects:
            raise DeltaflError(
                f"{folder} was played from Python with {name}, an object, and without it nobody "
                "can make its model: write it as FILE.py:NAME, which plays the same run, and "
                "export that"
            )
    cure = "put it right, or export another run"
    settings = checked(RunSettings, recorded, f"{folder} has impossible settings", cure)
    there = where_it_began(folder)
    with working_in(there), only(None if trust_code else frozenset()):
        # By what its model is judged does not matter, nor what the sampler is.
        task = task_of(settings.model_copy(update={"metric": None}))
        model = new_model(task.make_model, settings.seed)
    directory.require_settings(settings)
    round, arrays = found
    parts = task.parts_of(model)
    initial = NamedArrays.of(model).arrays
    beside = RestOfModel(parts, initial)
    memory = None
    if settings.memory_path is not None:
        memory = str(there / settings.memory_path)
    rows = local_rows(directory.memory_folder(memory))
    # A run whose model is lost keeps its last good one: no checkpoint holds another.
    rest = restored_part(beside.initial(task.num_clients, rows), arrays, "state.rest")
    beside.require_sound(rest)
    vector_d = restored_part(parts.flatten(initial), arrays, saved_model(arrays), Params)
    own = ModelTensors(model, parts)
    own.load(torch.tensor(vector_d))
    own.load_rest(beside.of_everyone(rest, task.population(settings.weights).weight_m))
    make_folder(to.parent)
    _write(to, dict(model.state_dict()))
    return round


def _write(to: Path, state: dict[str, Any]) -> None:
    for name, part in state.items():
        # What a module adds to its state need not be a tensor.
        if isinstance(part, torch.Tensor):
            # Else the whole vector would be saved with each of its parts.
            state[name] = part.detach().clone()
    if to.suffix == ".pt":
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_atomically(to, buffer.getvalue(), users=True)
        return
    types = {}
    for name, part in state.items():
        kind = getattr(part, "dtype", type(part).__name__)
        if kind in _AS_BITS:
            types[name], bits = _AS_BITS[kind]
            state[name] = part.view(bits)
        try:
            state[name] = state[name].numpy()
        except (AttributeError, TypeError):
            raise DeltaflError(
                f"{name} of the model has type {kind}, which a .safetensors file does not hold "
                "here: write a file that ends in .pt"
            ) from None
    # A model is exported to be handed on: others may read it.
    write_sealed(to, state, private=False, users=True, types=types)
