"""What is kept in files: text, sealed files, logs of lines, and folders with one owner.

``files.opened`` is the one function that opens files: what the store writes and reads is a regular
file of its own, no link to somebody else's.
"""

from .files import read_text, write_atomically
from .values import checked, plain_json, read_json, read_toml

__all__ = [
    "checked",
    "plain_json",
    "read_json",
    "read_text",
    "read_toml",
    "write_atomically",
]
