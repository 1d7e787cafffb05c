"""Reading what people write: TOML files and values of settings; every mistake becomes one sentence."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import DeltaflError


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dict, or one sentence about why not."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeltaflError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeltaflError(f"{path} is not valid TOML: {error}") from None


def sentence(error: Any) -> str:
    """One of pydantic's errors as a sentence with the option's name, what was given and what is allowed."""
    where = error["loc"]
    name = str(where[0]) if where else "settings"
    message = str(error["msg"])
    message = message[0].lower() + message[1:]
    message = message.replace("input should", "it must")
    return f"{name} is {_shown(error['input'])}; {message}"


def _shown(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else repr(value)
    return text or "empty"
