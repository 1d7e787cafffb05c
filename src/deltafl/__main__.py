"""``python -m deltafl``: the command line."""

from .cli.main import main

main()
