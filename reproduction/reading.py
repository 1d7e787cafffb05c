"""What the base of ``roles-lora`` and its clients read: roles of Shakespeare as characters.

Below ``roles.py`` and ``adapters.py``: the second needs torch and peft, and the first does not.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np

from deltafl import tasks

from .data import TINY_ALPHABET, Bytes, read_archive

#: The longest roles are for the base; the clients are some after them.
READ = 35
#: Characters that the model sees at once; after each it predicts the next one.
LENGTH = 32
BASE = Path(__file__).parents[1] / "results" / "lora" / "base.npz"


def texts(data_dir: Path | None = None) -> list[str]:
    """What each role says, the longest first."""
    found = read_archive("tinyshakespeare", data_dir)
    text = found["text"].tobytes().decode("ascii")
    return [text[first:last] for first, last in pairwise(found["offsets"].tolist())]


def tokens_of(text: str) -> Bytes:
    return tasks.encode_text(np.frombuffer(text.encode("ascii"), np.uint8), TINY_ALPHABET)
