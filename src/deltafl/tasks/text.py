"""Text by speaking role: 80 characters in, the next one out; ``tinyshakespeare`` and LEAF's ``shakespeare``.

- ``tinyshakespeare_roles.npz``: ``text`` uint8 (the bytes of all roles, end to end), ``offsets`` int64 (roles + 1,)
  where each starts, ``role`` their names. It is a small part of Shakespeare, and roles of one name in different plays
  are one role; so it is not LEAF's data set. Of each role with 1,000 characters or more the first 80 % are for training
  and the rest for the test; each is cut into windows of 80 characters and the one after, which start 10 apart.
- LEAF's JSON (see ``leaf.py``): x is 80 characters, y the next one; its windows start 1 character apart, and lines are
  padded with spaces in front.

Inputs are tokens, uint8 (N, 80). A character that is not in the alphabet becomes a space.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError
from ..types import IntArray
from .base import Dataset
from .images import Found, read_arrays
from .leaf import PARTS, Owned, Share, dataset_by_user, find_leaf, read_shares
from .sources import folders_of, not_found

#: The characters of ``tinyshakespeare``, in the order of their codes, and those of LEAF.
TINY_ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
LEAF_ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"

#: Characters that the model sees, and how far apart windows of ``tinyshakespeare`` start.
WINDOW, STRIDE = 80, 10

#: ``tinyshakespeare``: roles with fewer characters are left out; of the others this share is for training.
FEWEST_OF_ROLE, TRAIN_SHARE = 1000, 0.8

Tokens = npt.NDArray[np.uint8]


def load_tinyshakespeare(found: Found) -> Dataset:
    """Load the roles of an archive; the column of owners is ``role``, the number of the role in the archive."""
    arrays = read_arrays(found.path, ("text", "offsets", "role"))
    text, offset = arrays["text"], arrays["offsets"]
    whole = offset.ndim == 1 and offset.dtype.kind in "iu" and len(offset) == len(arrays["role"]) + 1
    if text.dtype != np.uint8 or text.ndim != 1 or not whole:
        raise DeltaflError(
            f"{found.path}: needs text uint8 (characters,) and a whole offset before and after each role"
        )
    if offset[0] != 0 or offset[-1] != len(text) or (offset[1:] < offset[:-1]).any():
        raise DeltaflError(f"{found.path}: offsets must rise from 0 to {len(text)}, the length of the text")
    tokens = encode(text, TINY_ALPHABET)
    parts: dict[str, list[tuple[Tokens, IntArray, IntArray]]] = {part: [] for part in PARTS}
    for role, (first, last) in enumerate(pairwise(offset)):
        if last - first >= FEWEST_OF_ROLE:
            cut = first + int(TRAIN_SHARE * (last - first))
            for part, said in zip(PARTS, (tokens[first:cut], tokens[cut:last]), strict=True):
                x, y = windows(said)
                parts[part].append((x, y, np.full(len(y), role)))
    if not parts["train"]:
        raise DeltaflError(f"{found.path}: no role has {FEWEST_OF_ROLE} characters or more")
    train, test = ([np.concatenate(piece) for piece in zip(*parts[part], strict=True)] for part in PARTS)
    columns, test_columns = {"role": train[2]}, {"role": test[2]}
    return Dataset(
        found.title,
        train[0],
        train[1],
        test[0],
        test[1],
        len(TINY_ALPHABET),
        columns=columns,
        test_columns=test_columns,
    )


def load_shakespeare(data_dir: Path | None = None) -> Dataset:
    """Load Shakespeare from LEAF's folder; the column of owners is ``role``.

    Raises:
        DeltaflError: If it is not found, or a file is broken; the sentence names file, user and row.
    """
    folders = folders_of("shakespeare", data_dir)
    root = find_leaf("shakespeare", folders)
    if root is None:
        raise not_found("shakespeare", folders)
    train, test = (_leaf_part(read_shares(root, part)) for part in PARTS)
    return dataset_by_user("Shakespeare (LEAF's JSON)", "role", train, test, len(LEAF_ALPHABET))


def encode(code_k: npt.NDArray[Any], alphabet: str) -> Tokens:
    """Positions in the alphabet of characters given by their codes; a space for those that are not in it."""
    table = np.full(256, alphabet.index(" "), np.uint8)
    table[[ord(letter) for letter in alphabet]] = np.arange(len(alphabet))
    return table[np.where(code_k < 256, code_k, ord(" "))]


def windows(token_k: Tokens) -> tuple[Tokens, IntArray]:
    """Windows of ``WINDOW`` tokens, ``STRIDE`` apart, and the token after each: uint8 (N, 80) and int64 (N,)."""
    if len(token_k) <= WINDOW:
        return np.zeros((0, WINDOW), np.uint8), np.zeros(0, np.int64)
    piece = np.lib.stride_tricks.sliding_window_view(token_k, WINDOW + 1)[::STRIDE]
    return piece[:, :WINDOW].copy(), piece[:, WINDOW].astype(np.int64)


def _leaf_part(shares: Iterator[Share]) -> Owned:
    x, y, owner = [np.zeros((0, WINDOW), np.uint8)], [np.zeros(0, np.uint8)], []
    for share in shares:
        for row, (seen, following) in enumerate(zip(share.x, share.y, strict=True)):
            if not isinstance(seen, str) or len(seen) != WINDOW:
                raise share.error(row, f"x must be a string of {WINDOW} characters")
            if not isinstance(following, str) or len(following) != 1:
                raise share.error(row, "y must be one character")
        x.append(encode(_codes("".join(share.x)), LEAF_ALPHABET).reshape(-1, WINDOW))
        y.append(encode(_codes("".join(share.y)), LEAF_ALPHABET))
        owner += [share.user] * len(share.y)
    return Owned(np.concatenate(x), np.concatenate(y).astype(np.int64), owner)


def _codes(text: str) -> npt.NDArray[np.uint32]:
    # surrogatepass: JSON may hold half of a pair, which is in no alphabet either
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
