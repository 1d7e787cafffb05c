"""Files that others can read: JSON without NaN, and writing that is never seen half done."""

import os
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any


def plain_json(value: Any) -> Any:
    """``value`` with tuples as lists and numbers that are not finite as None, however deep."""
    if isinstance(value, float):
        return float(value) if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(entry) for entry in value]
    return value


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader (or a restart) sees the old one or the new one, never a part."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
