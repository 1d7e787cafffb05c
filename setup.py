"""The part of ``pyproject.toml`` that is made: the README as a package index shows it, whose links
and pictures lead to the files of this version in the repository.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def absolute(link: re.Match[str]) -> str:
    """The start of a link to a file, with the address of the repository."""
    kind = "raw" if link[2].endswith((".png", ".svg")) else "blob"
    return f"{link[1]}{project['urls']['Repository']}/{kind}/v{project['version']}/{link[2]}"


# In Markdown and in HTML; neither those with an address nor those within the page.
RELATIVE = re.compile(r"""(\]\(|(?:src|srcset|href)=")(?![a-z]+:|#)([^)"\s]+)""")
readme = (ROOT / "README.md").read_text(encoding="utf-8")
setup(
    long_description=RELATIVE.sub(absolute, readme),
    long_description_content_type="text/markdown",
)
