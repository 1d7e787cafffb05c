"""``roles-lora``: roles of Shakespeare that write in different hands, for adapters of a language
model that has read other roles.

The base, a transformer of characters, has read the longest roles of ``tinyshakespeare_roles.npz``
(``adapters.py``). The next ones are the clients, and each writes in one of ``HANDS``: what they say
differs little, how they write it differs much. LoRA is trained and sent, the base stays where it
is.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafl import DeltaflError, tasks
from deltafl.types import IntArray

from .data import ARCHIVES, TRAIN_SHARE, Bytes, joined_roles
from .reading import BASE, LENGTH, READ, texts, tokens_of

#: So many roles after those that the base has read.
CLIENTS = 64

_SMALL = "abcdefghijklmnopqrstuvwxyz"
_LARGE = _SMALL.upper()
_TURNED = _SMALL[13:] + _SMALL[:13]
#: How roles write: the characters that take the place of others. The base has read the first.
HANDS = {
    "plain": ("", ""),
    "capitals": (_SMALL, _LARGE),
    "small letters": (_LARGE, _SMALL),
    "one word a line": (" ", "\n"),
    "hyphens": (" ", "-"),
    "one vowel": ("aeiou", "eeeee"),
    "letters turned by 13": (_SMALL + _LARGE, _TURNED + _TURNED.upper()),
    "letters turned by 13, capitals": (_SMALL + _LARGE, _TURNED.upper() * 2),
}


def in_hand(text: str, number: int) -> str:
    """A text as the client of this number writes it, of the same length."""
    old, new = list(HANDS.values())[number % len(HANDS)]
    return text.translate(str.maketrans(old, new))


def sequences(text: str) -> tuple[Bytes, IntArray]:
    """Tokens (N, LENGTH) and for each the next one; the rest of the text is left out."""
    token_k = tokens_of(text)
    count = (len(token_k) - 1) // LENGTH
    shape = (count, LENGTH)
    next_k = token_k[1 : count * LENGTH + 1].astype(np.int64)
    return token_k[: count * LENGTH].reshape(shape), next_k.reshape(shape)


def load_roles(data_dir: Path | None = None) -> tasks.Dataset:
    """The clients' roles in their hands, the end of each for the test; the column of owners is
    ``role``.
    """
    if not BASE.is_file():
        raise DeltaflError(f"{BASE} is missing: python -m reproduction.adapters makes it")
    digest = hashlib.sha256(BASE.read_bytes()).hexdigest()
    pieces: list[tuple[npt.NDArray[Any], ...]] = []
    for number, text in enumerate(texts(data_dir)[READ : READ + CLIENTS]):
        cut = int(TRAIN_SHARE * len(text))
        train_x, train_y = sequences(in_hand(text[:cut], number))
        test_x, test_y = sequences(in_hand(text[cut:], number))
        roles = [np.full(len(y), number) for y in (train_y, test_y)]
        pieces.append((train_x, train_y, test_x, test_y, *roles))
    title = f"{ARCHIVES['tinyshakespeare']['title']} in {len(HANDS)} hands, base {digest[:8]}"
    return joined_roles(title, pieces)


def make_model() -> Any:
    """The base with LoRA, whose first matrices are random."""
    # Torch and peft are optional.
    from .adapters import adapted

    return adapted(BASE)


tasks.register(
    tasks.TaskSpec(
        *("roles-lora", CLIENTS, 8, 1.0, make_model),
        summary="LoRA for roles of Shakespeare in different hands; tinyshakespeare_roles.npz, peft",
        needs=("torch", "archive"),
        load=load_roles,
        local_steps=10,
        batch_size=8,
        partition="natural",
        tokens=True,
        trainable="lora",
    )
)
