"""Versions and hardware, as they go into records."""

import os
import platform
import sys
from importlib import metadata
from pathlib import Path


def environment() -> dict[str, str | int]:
    """Versions and hardware, as they go into records."""
    names = ("deltafl", "numpy", "torch", "scikit-learn", "scipy")
    versions: dict[str, str | int] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "python": platform.python_version(),
        **versions,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "command": " ".join(["deltafl" if "deltafl" in sys.argv[0] else Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
