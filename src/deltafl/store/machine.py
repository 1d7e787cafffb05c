"""What the last bits of a result depend on: versions, the system, the processor."""

import platform
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import log
from ..types import Json


@cache  # looking for versions takes 75 ms, a tenth of a short run
def made_with(*packages: str) -> dict[str, str]:
    """All of it by name, with the versions of NumPy and these packages."""
    names = ("numpy", *packages)
    return {
        "python": platform.python_version(),
        **{name: version_of(name) or "not installed" for name in names},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        # One name of a processor may stand for several, on rented machines above all.
        "vectors": " ".join(np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])),
    }


def warn_of_other(before: Any, now: Json, where: str) -> None:
    """Log that what follows a state of other versions, or of another machine, may differ."""
    if not isinstance(before, Mapping):  # an older file does not say
        return
    other = [name for name in now if before.get(name, now[name]) != now[name]]
    if other:
        known = ", ".join(f"{name} {before[name]}" for name in other)
        found = ", ".join(f"{name} {now[name]}" for name in other)
        log.warning(
            "%s was made with %.300s, and here it is %.300s: what follows may differ in its last "
            "bits",
            where,
            known,
            found,
        )


def version_of(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _processor() -> str:
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.exists() else []
    found = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.processor() or "unknown")
