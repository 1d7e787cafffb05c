"""``python -m deltafl``: the command line."""

from .cli import main

main()
