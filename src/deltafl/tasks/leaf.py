"""LEAF's own files: ``data/train/*.json`` and ``data/test/*.json``, as its ``preprocess.sh`` leaves them.

Each file is ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}``. What an x is
depends on the data set: 784 numbers from 0 (ink) to 1 (paper) for FEMNIST, the name of a picture for CelebA, a string
for Shakespeare. A folder fits if it is the one with ``train`` and ``test``, the one above (LEAF's ``data/femnist``), or
the whole repository.

Source: Caldas et al., "LEAF: a benchmark for federated settings", arXiv:1812.01097.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError
from ..io import read_json
from ..types import IntArray
from .base import Dataset

PARTS = ("train", "test")


class Share(NamedTuple):
    """What one file says of one user: x and y have the same length, at least 1."""

    path: Path
    user: str
    x: list[Any]
    y: list[Any]

    def error(self, row: int, problem: str) -> DeltaflError:
        """A mistake in one of the user's rows, which count from 1."""
        return DeltaflError(f"{self.path}: user {self.user!r}, row {row + 1}: {problem}")


class Owned(NamedTuple):
    """Examples with their owners: inputs, labels int64, owners' names, all aligned."""

    x: npt.NDArray[Any]
    y: IntArray
    owner: list[str]


def find_leaf(name: str, folders: Sequence[Path]) -> Path | None:
    """The folder with ``train`` and ``test`` of a data set of LEAF; None if there is none."""
    for folder in folders:
        for root in (folder / "data", folder, folder / "data" / name / "data"):
            if all(any((root / part).glob("*.json")) for part in PARTS):
                return root
    return None


def read_shares(root: Path, part: str) -> Iterator[Share]:
    """The users of all files of a part, file after file; one file is in memory at a time.

    Raises:
        DeltaflError: If a file is not as described above; the sentence names file and user.
    """
    for path in sorted((root / part).glob("*.json")):
        content = read_json(path)
        if not isinstance(content, dict) or not {"users", "user_data"} <= content.keys():
            raise DeltaflError(f"{path} is not a file of LEAF: needs 'users', 'num_samples' and 'user_data'")
        for user, count in _users(path, content["users"], content.get("num_samples")):
            share = _share(path, user, content["user_data"], count)
            if share.y:
                yield share


def _users(path: Path, users: object, counts: object) -> list[tuple[str, int | None]]:
    """The users of a file, each with the number of samples that it says."""
    if not isinstance(users, list) or not isinstance(counts, list | None):
        raise DeltaflError(f"{path}: users and num_samples must be lists, got {shown(users)} and {shown(counts)}")
    counts = counts or [None] * len(users)
    if len(counts) != len(users):
        raise DeltaflError(f"{path}: {len(users)} users but {len(counts)} num_samples")
    known: dict[str, int | None] = {}
    for user, count in zip(users, counts, strict=True):
        if not isinstance(user, str) or not (count is None or isinstance(count, int)):
            raise DeltaflError(
                f"{path}: user {shown(user)} with {shown(count)} samples: needs a name and a whole number"
            )
        if user in known:
            raise DeltaflError(f"{path}: user {user!r} is there twice; list each once")
        known[user] = count
    return list(known.items())


def _share(path: Path, user: str, data: Any, count: int | None) -> Share:
    found = data.get(user) if isinstance(data, dict) else None
    if not isinstance(found, dict) or not all(isinstance(found.get(key), list) for key in ("x", "y")):
        raise DeltaflError(f"{path}: user {user!r} has no lists x and y in user_data")
    share = Share(path, user, found["x"], found["y"])
    if len(share.x) != len(share.y) or count not in {None, len(share.y)}:
        said = "" if count is None else f", num_samples says {count}"
        raise DeltaflError(f"{path}: user {user!r} has {len(share.x)} x and {len(share.y)} y{said}")
    return share


def labels_of(share: Share, classes: int) -> IntArray:
    """The user's y as class labels; numbers such as 1.0 are taken, for LEAF's CelebA has them."""
    for row, label in enumerate(share.y):
        whole = isinstance(label, int | float) and label == label // 1
        if not whole or not 0 <= label < classes:
            raise share.error(row, f"y is {shown(label)}; it must be a whole number from 0 to {classes - 1}")
    return np.array(share.y, dtype=np.int64)


def dataset_by_user(title: str, column: str, train: Owned, test: Owned, classes: int) -> Dataset:
    """A data set from two parts; owners are numbered in the order of their names, over both parts.

    Users of the test part who hold no training examples are no clients; their examples are in the pooled test set only.
    """
    for part, owned in zip(PARTS, (train, test), strict=True):
        if len(owned.y) == 0:
            raise DeltaflError(f"{title}: there is no {part} example")
    number = {user: index for index, user in enumerate(sorted({*train.owner, *test.owner}))}
    owner, test_owner = (np.array([number[user] for user in part.owner]) for part in (train, test))
    users = len(set(train.owner))
    return Dataset(
        f"{title}, {users} clients",
        train.x,
        train.y,
        test.x,
        test.y,
        classes,
        columns={column: owner},
        test_columns={column: test_owner},
    )
