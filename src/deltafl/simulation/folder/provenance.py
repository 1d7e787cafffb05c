"""What a run was played on: the versions and the hardware that records have, and what
``deltafl info`` adds for a report of a fault.

Nothing of it names a person or a machine: a path is shown below ``~`` or not at all.
"""

import os
import platform
import re
import shlex
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from ...errors import DeltaflError
from ...scale.stretches import cores_allowed
from ...store import checked, read_json
from ...store.files import with_home
from ...store.machine import made_with, version_of
from ...tasks.data.files import DATA_VARIABLE, cache_folder
from ...tasks.registry import MODULES_VARIABLE
from ...types import Json

#: Variables that change what runs do or how fast they are, by whether their value is shown: it is
#: not where it may name a person, a machine or a password.
VARIABLES = {
    DATA_VARIABLE: False,
    MODULES_VARIABLE: False,
    "XDG_CACHE_HOME": False,
    "MLFLOW_TRACKING_URI": False,
    "MLFLOW_EXPERIMENT_NAME": False,
    "OMP_NUM_THREADS": True,
    "OPENBLAS_NUM_THREADS": True,
    "MKL_NUM_THREADS": True,
    "OPENBLAS_CORETYPE": True,
    "CUDA_VISIBLE_DEVICES": True,
    "WORLD_SIZE": True,
    "LOCAL_RANK": True,
}


#: Beside NumPy, whose versions the last bits of a run depend on.
PACKAGES = ("torch", "scikit-learn", "scipy")


def _as_number(text: str) -> str:
    float(text)
    return text


class Noted(BaseModel):
    """What is read from a folder's ``environment.json``, which has more."""

    model_config = ConfigDict(extra="allow")

    objects: list[str] = []  #: the names of objects that settings carried
    code: dict[str, str] = {}  #: descriptions of the user's own code, by name
    directory: str = ""  #: the working directory, from the folder
    data: str = ""  #: the name of the data
    clients: str = ""  #: how many
    majority: Annotated[str, AfterValidator(_as_number)] = "0"
    data_crc32: str = ""
    examples_crc32: str = ""  #: of a table, whatever the seed
    model: Json = {}


def noted(file: Path) -> Json:
    """What an ``environment.json`` says."""
    cure = "put the file back, or choose another folder"
    if not file.exists():
        raise DeltaflError(f"{file} is not there: {cure}")
    return checked(Noted, read_json(file), str(file), cure).model_dump(exclude_unset=True)


def environment() -> dict[str, str | int]:
    """Versions and hardware, as they go into records."""
    program = "deltafl" if "deltafl" in sys.argv[0] else Path(sys.argv[0]).name
    return {
        **made_with(*PACKAGES),
        "deltafl": version_of("deltafl") or "not installed",
        "cores": os.cpu_count() or 1,
        "command": shlex.join([program, *sys.argv[1:]]),
    }


def report() -> Json:
    """What one needs to know to repeat a fault, for ``deltafl info``; loads torch if it is there.

    The keys of ``environment``, without the command, then ``cores allowed``, ``threads``, ``gpu``,
    ``packages`` (versions by name, of all extras), ``missing`` (packages by extra), ``cache`` and
    ``variables``.
    """
    found, missing = _packages()
    known = {**environment(), "system": f"{_system()} {platform.machine()}"}
    del known["command"]
    return {
        **known,
        "cores allowed": cores_allowed(),
        **_torch(),
        "packages": {name: version for name, version in found.items() if name not in known},
        "missing": missing,
        "cache": below_home(cache_folder()),
        "variables": {name: _shown(name) for name in VARIABLES if os.environ.get(name)},
    }


def below_home(path: Path) -> str:
    """A path that begins with ``~``; of another one only that it is not there."""
    with suppress(ValueError):
        return str(Path("~") / path.absolute().relative_to(with_home("~")))
    return "outside the home folder"


def _packages() -> tuple[dict[str, str], dict[str, list[str]]]:
    """What ``pyproject.toml`` asks for: the versions that are installed, and by extra the names
    of what is not.
    """
    try:
        needed = metadata.requires("deltafl") or []
    except metadata.PackageNotFoundError:  # the sources without an installation
        needed = []
    found: dict[str, str] = {}
    missing: dict[str, list[str]] = {}
    for text in needed:
        # The name in ``torch>=2.6; extra == "sim"``, and the extra if there is one.
        asked = re.match(r"([\w.-]+).*?(?:extra == ['\"](\w+)['\"])?$", text)
        if asked is None or asked[2] in {"all", "dev", "docs"}:
            continue
        name = asked[1]
        version = version_of(name)
        if version:
            found[name] = version
        else:
            missing.setdefault(asked[2] or "deltafl itself", []).append(name)
    return found, missing


def _system() -> str:
    """The name of the system that its users know."""
    with suppress(OSError):
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    return f"{platform.system()} {platform.mac_ver()[0] or platform.release()}"


def _torch() -> Json:
    """Threads and accelerators, as torch sees them."""
    try:
        import torch
    except (ImportError, OSError) as error:  # the text of a broken one would have paths
        return {"gpu": f"unknown, as torch does not load ({type(error).__name__})"}
    count = torch.cuda.device_count()
    names = [torch.cuda.get_device_name(number) for number in range(count)]
    if torch.backends.mps.is_available():
        names.append("Apple's, which deltafl does not use")
    return {
        "torch vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda or "not in this torch",
        "gpu": ", ".join(names) or "none",
    }


def _shown(name: str) -> str:
    return os.environ[name] if VARIABLES[name] else "set"
