"""``python -m deltafl``: the command line."""

import sys
from pathlib import Path

# Python puts the folder that the command is given in there, which may be somebody else's, with a
# numpy.py in it.
if Path(sys.path[0]) == Path.cwd() != Path(__file__).parent.parent:
    del sys.path[0]

try:
    from .cli.main import main

    main()
finally:
    # If Ctrl-C met a text that was executed, such as a dataclass's, Python would end by the signal
    # and not by the exit code; the next text makes it forget that.
    exec("")
