"""``python -m deltafl``: the command line."""

import sys
from pathlib import Path

# Python puts the folder that the command is given in there, which may be somebody else's, with a
# numpy.py in it.
if Path(sys.path[0]) == Path.cwd() != Path(__file__).parent.parent:
    del sys.path[0]

from .cli.main import main

main()
