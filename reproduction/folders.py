"""Whose a folder is: results are written only where nobody else's are."""

from pathlib import Path
from typing import Any

from deltafl.errors import DeltaflError
from deltafl.io import read_json, read_toml

#: What a page overwrites; it is this package's only where a verdict lies beside it.
_PAGE = ("README.md", "table.csv")


def require_ours(folder: Path, name: str) -> None:
    """Refuse a folder that holds something else than results of the experiment ``name``, before anything is written.

    Raises:
        DeltaflError: If its ``verdict.json`` or ``config.toml`` is of another experiment or of none, or if it has a
            page without a verdict, so one of somebody else.
    """
    verdict, config = folder / "verdict.json", folder / "config.toml"
    if folder.exists() and not folder.is_dir():
        raise DeltaflError(f"{folder} is a file; choose another --out, a folder")
    for path, key in ((verdict, "name"), (config, "experiment")):
        if path.exists():
            found = _content(path).get(key)
            if found != name:
                of = f"results of {found}" if isinstance(found, str) else "something else"
                raise DeltaflError(f"{folder} holds {of}, not of {name}, as {path.name} says; choose another --out")
    for page in _PAGE:
        if (folder / page).exists() and not verdict.exists():
            raise DeltaflError(
                f"{folder / page} is not of {name}, for no {verdict.name} is beside it, and it would be overwritten; "
                "move it away or choose another --out"
            )


def _content(path: Path) -> dict[str, Any]:
    if path.suffix == ".toml":
        return read_toml(path)
    try:
        content = read_json(path)
    except DeltaflError:
        return {}
    return content if isinstance(content, dict) else {}
