"""What a program writes to a pseudo-terminal."""

import os
import re

_STYLE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def read_terminal(ours: int) -> str:
    """All that is written until nobody can write any more, colours and moves left out; closes it."""
    written = b""
    try:
        while part := os.read(ours, 65536):
            written += part
    except OSError:  # how Linux says that nobody writes any more
        pass
    os.close(ours)
    return _STYLE.sub("", written.decode()).replace("\r", "")
