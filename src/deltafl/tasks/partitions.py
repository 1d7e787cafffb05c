"""Who holds which example: the partitions, and test sets that are cut from the examples of each
owner.

No example belongs to two clients, no client is empty, and the rows of a client are sorted. Every
example belongs to a client, except for N mod m of them with ``hsu2019``, whose clients are equal,
and for owners that are not drawn. The suffix ``_e`` stands for examples, ``_c`` for classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..errors import DeltaflError, unknown_name
from ..types import BoolArray, FloatArray, IntArray
from .base import Dataset

#: ``quantity``: 10 % of the clients own 90 % of the data.
SMALL_SHARE = 0.1

#: Of each owner's examples the 5th, 15th, 25th, ... are for the test.
TEST_EVERY = 10
TEST_FIRST = 4


def iid(
    label_e: IntArray,
    num_clients: int,
    rng: np.random.Generator,
) -> list[IntArray]:
    """Deal the examples at random; sizes differ by one at most."""
    return _deal(rng.permutation(len(label_e)), num_clients)


def hsu2019(
    label_e: IntArray, num_clients: int, alpha: float, rng: np.random.Generator
) -> list[IntArray]:
    """Equal clients with label mixes q_i ~ Dir(alpha * prior), where prior are the classes' shares
    of the data.

    A client draws its N // m examples one after the other, with label ~ q_i and without
    replacement; when a class is used up, q_i is renormalised over the others. ``alpha`` is the
    total concentration: over 10 balanced classes the mean share of a client's largest class is
    about 0.94, 0.78, 0.66 for 0.1, 0.5, 1 (Hsu et al., arXiv:1909.06335).
    """
    pool_c = _pools(label_e, rng)
    left_c = np.array([len(pool) for pool in pool_c])
    prior_c = left_c / len(label_e)
    size = len(label_e) // num_clients
    clients = []
    for _ in range(num_clients):
        take_c = _draw_labels(left_c, alpha * prior_c, size, rng)
        # The pools are shuffled, so the next take examples of a pool are a random draw from it.
        rows = [
            pool[left - take : left]
            for pool, left, take in zip(pool_c, left_c, take_c, strict=True)
        ]
        left_c = left_c - take_c
        clients.append(np.sort(np.concatenate(rows)))
    return clients


def _draw_labels(
    left_c: IntArray, concentration_c: FloatArray, size: int, rng: np.random.Generator
) -> IntArray:
    """How many examples of each class one client with q ~ Dir(``concentration_c``) takes; they sum
    to ``size`` and never exceed ``left_c``.

    Rejecting a draw from an empty pool and drawing again is the same as renormalising, whenever the
    rejected ones are drawn again; hence whole multinomials instead of a loop over examples, exact
    in distribution.
    """
    mix_c = rng.dirichlet(concentration_c)
    take_c = np.zeros_like(left_c)
    while (missing := size - int(take_c.sum())) > 0:
        open_c = take_c < left_c
        share_c = np.where(open_c, mix_c, 0.0)
        if share_c.sum() <= 0.0:
            # What remains of q_i was rounded to 0. A part of a Dirichlet, renormalised, is a
            # Dirichlet too.
            share_c[open_c] = rng.dirichlet(concentration_c[open_c])
            mix_c = share_c
        take_c = np.minimum(
            take_c + rng.multinomial(missing, share_c / share_c.sum()),
            left_c,
        )
    return take_c


def yurochkin2019(
    label_e: IntArray, num_clients: int, alpha: float, rng: np.random.Generator
) -> list[IntArray]:
    """Unequal clients: class k is cut into m parts with shares ~ Dir(alpha * 1_m).

    A client without any example (usual with small alpha) is given one, drawn from the client that
    then has the most. For many clients that hold many examples the labels of a client are about
    Dir(alpha * 1_C): over 10 classes the mean share of its largest class is about 0.66, 0.38, 0.29
    for alpha = 0.1, 0.5, 1 (Yurochkin et al., ICML 2019).
    """
    parts: list[list[IntArray]] = [[] for _ in range(num_clients)]
    for pool in _pools(label_e, rng):
        share_m = rng.dirichlet(np.full(num_clients, alpha))
        # Sums are rounded, not shares: so each example is in one part, and none is lost.
        cuts = np.rint(np.cumsum(share_m)[:-1] * len(pool)).astype(np.int64)
        for part, rows in zip(parts, np.split(pool, cuts), strict=True):
            part.append(rows)
    clients = [np.sort(np.concatenate(part)) for part in parts]
    size_m = np.array([len(rows) for rows in clients])
    for client in np.flatnonzero(size_m == 0):
        # The largest client at this moment: it has given away one before, perhaps.
        giver = int(np.argmax(size_m))
        given = int(rng.integers(size_m[giver]))
        clients[client] = clients[giver][given : given + 1]
        clients[giver] = np.delete(clients[giver], given)
        size_m[client] = 1
        size_m[giver] -= 1
    return clients


def shards(
    label_e: IntArray,
    num_clients: int,
    rng: np.random.Generator,
) -> list[IntArray]:
    """Sort by label, cut into 2 m equal shards, deal two to each client (McMahan et al., AISTATS
    2017).
    """
    # Two labels a client at most, in the paper's words "pathological".
    num_shards = 2 * num_clients
    if num_shards > len(label_e):
        raise DeltaflError(
            f"{num_clients} clients with two shards need {num_shards} examples, there are "
            f"{len(label_e)}"
        )
    piece = np.array_split(np.concatenate(_pools(label_e, rng)), num_shards)
    dealt_m2 = rng.permutation(num_shards).reshape(num_clients, 2)
    return [np.sort(np.concatenate([piece[first], piece[second]])) for first, second in dealt_m2]


def split(
    label_e: IntArray,
    num_clients: int,
    rng: np.random.Generator,
) -> list[IntArray]:
    """Single-label clients of two sizes: one of C labels, drawn at random, is cut into m - C + 1
    small clients.

    The other C - 1 labels are one large client each; these come first. With FashionMNIST and m =
    109: 9 clients with 6000 images and 100 clients with 60, so that about 10 % of the clients own
    90 % of the data (DELTA, NeurIPS 2023).
    """
    pool_c = _pools(label_e, rng)
    cut = pool_c.pop(int(rng.integers(len(pool_c))))
    num_small = num_clients - len(pool_c)
    if not 1 <= num_small <= len(cut):
        raise DeltaflError(
            f"partition 'split' got {num_clients} clients; write {len(pool_c) + 1} to "
            f"{len(pool_c) + len(cut)}"
        )
    return [np.sort(pool) for pool in pool_c] + _deal(cut, num_small)


def quantity(
    label_e: IntArray,
    num_clients: int,
    rng: np.random.Generator,
) -> list[IntArray]:
    """Labels at random, two sizes: the first 10 % of m >= 2 clients (at least one) share 90 % of
    the data.
    """
    num_large = max(1, round(SMALL_SHARE * num_clients))
    num_small = num_clients - num_large
    owned_by_small = round(SMALL_SHARE * len(label_e))
    if num_clients < 2 or owned_by_small < num_small:
        raise DeltaflError(
            f"partition 'quantity' got {num_clients} clients and {len(label_e)} examples; it needs "
            "2 clients, and 10 examples for each small one"
        )
    large, small = np.split(
        rng.permutation(len(label_e)),
        [len(label_e) - owned_by_small],
    )
    return _deal(large, num_large) + _deal(small, num_small)


def natural(
    owner_e: IntArray,
    num_clients: int,
    rng: np.random.Generator,
) -> list[IntArray]:
    """One client for each owner, in increasing order of their ids; of more than m owners, m are
    drawn at random.
    """
    clients = rows_by_key(owner_e)
    # Nothing is drawn then, so the seed makes no difference.
    if num_clients == len(clients):
        return clients
    return [
        clients[owner]
        for owner in np.sort(
            rng.choice(
                len(clients),
                num_clients,
                replace=False,
            )
        )
    ]


@dataclass(frozen=True)
class Partition:
    """One row of ``PARTITIONS``; the suffixes of ``uses_`` are what it needs or reads.

    ``make(key_e, num_clients, [alpha], rng)`` takes the labels or, for partitions by a column, the
    owners; ``column`` is the name that this column must have, None for any.
    """

    summary: str
    make: Callable[..., list[IntArray]]
    uses_labels: bool = False
    uses_alpha: bool = False
    uses_column: bool = False
    column: str | None = None


_by_label = partial(Partition, uses_labels=True)
_dirichlet = partial(_by_label, uses_alpha=True)
_by_owner = partial(Partition, make=natural, uses_column=True)
PARTITIONS: dict[str, Partition] = {
    "iid": Partition("examples dealt at random, equal sizes", iid),
    "hsu2019": _dirichlet(
        "labels of a client ~ Dir(alpha * prior); equal sizes",
        hsu2019,
    ),
    "yurochkin2019": _dirichlet(
        "each label cut by Dir(alpha * 1); unequal sizes",
        yurochkin2019,
    ),
    "dirichlet": _dirichlet("another name of yurochkin2019", yurochkin2019),
    "shards": _by_label(
        "sorted by label, cut into equal shards, two dealt to each client",
        shards,
    ),
    "split": _by_label(
        "one label a client, one of them cut into many small clients",
        split,
    ),
    "quantity": Partition(
        "labels at random; 10 % of the clients own 90 % of the data",
        quantity,
    ),
    "natural": _by_owner("one client for each owner in a column of the data set"),
    "writer": _by_owner(
        "one client for each writer, where they are known",
        column="writer",
    ),
}


def find_partition(name: str) -> Partition:
    """The partition of this name."""
    if name not in PARTITIONS:
        raise unknown_name("partition", name, PARTITIONS)
    return PARTITIONS[name]


def make_partition(
    name: str,
    dataset: Dataset,
    num_clients: int | None,
    alpha: float,
    rng: np.random.Generator,
    column: str | None = None,
) -> list[IntArray]:
    """Split a data set's training examples over clients: m arrays of rows, int64, sorted, disjoint,
    none empty.

    ``num_clients`` None takes all owners, with ``natural`` and ``writer`` alone. ``alpha``, from
    1e-6 (one label a client) to 1e6 (iid), is the concentration of the Dirichlet partitions.
    ``column`` is that of the owners, needed if the data set has several.

    Raises:
        DeltaflError: If the name is unknown, the data set lacks labels or the column, or the
            numbers are impossible.
    """
    partition = find_partition(name)
    if partition.uses_labels and dataset.num_classes == 0:
        raise DeltaflError(
            f"partition {name!r} needs class labels, and this task has none: choose 'iid' or "
            "'quantity'"
        )
    # Beyond these numbers a Dirichlet sample is rounded away.
    if partition.uses_alpha and not 1e-6 <= alpha <= 1e6:
        raise DeltaflError(
            f"alpha is {alpha}; write a number from 1e-6 (one label a client) to 1e6 (iid)"
        )
    key_e = dataset.train_y
    most = len(key_e)
    if partition.uses_column:
        key_e = dataset.columns[owner_column(name, dataset, column)]
        most = len(np.unique(key_e))
        if num_clients is None:
            num_clients = most
    elif column is not None:
        raise DeltaflError(
            f"partition {name!r} deals the rows, and column {column!r} says who holds them: leave "
            "one of them out"
        )
    if num_clients is None or not 1 <= num_clients <= most:
        raise DeltaflError(
            f"partition {name!r} got {num_clients} clients; write a number from 1 to {most}, such "
            "as clients=20, or --clients 20"
        )
    if partition.uses_alpha:
        return partition.make(key_e, num_clients, alpha, rng)
    return partition.make(key_e, num_clients, rng)


def owner_column(name: str, dataset: Dataset, column: str | None) -> str:
    """The name of the column of owners that ``natural`` or ``writer`` uses."""
    needed = PARTITIONS[name].column
    found = needed or column
    names = list(dataset.columns)
    if found is None and len(names) == 1:
        found = names[0]
    if found not in names or column not in {None, found}:
        raise DeltaflError(
            f"partition {name!r} needs {needed or 'a column of owners'}, got {column!r}; "
            f"{dataset.name} has {', '.join(names) or 'none'}"
        )
    return found


def clients_of_tests(
    name: str, dataset: Dataset, column: str | None, client_rows: Sequence[IntArray]
) -> IntArray | None:
    """The client of each test example, -1 where its owner is none; None where owners are unknown,
    or the partition does not ask for them.
    """
    if not PARTITIONS[name].uses_column:
        return None
    owner = owner_column(name, dataset, column)
    if owner not in dataset.test_columns:
        return None
    owner_e = dataset.columns[owner]
    # By a client's first row: all of its rows have one owner.
    client_of = {int(owner_e[rows[0]]): client for client, rows in enumerate(client_rows)}
    test_owners = dataset.test_columns[owner].tolist()
    return np.array([client_of.get(owner, -1) for owner in test_owners], np.int64)


def hold_out_by_owner(
    whole: Dataset, column: str, owner_e: IntArray, fewest: int = 1, most: int | None = None
) -> Dataset:
    """Cut a test set from the examples of each owner; deterministic, hence the same for every seed.

    Owners (``owner_e``, int64 (N,)) with fewer than ``fewest`` of the training examples in
    ``whole`` are left out; of the others the first ``most`` are used, all if None. Of these the
    5th, 15th, 25th, ... are for the test.

    Raises:
        DeltaflError: If no owner has an example for the test.
    """
    used = [rows[:most] for rows in rows_by_key(owner_e) if len(rows) >= fewest]
    test_e = every_tenth(used, len(owner_e))
    if not test_e.any():
        raise DeltaflError(
            f"{whole.name}: no {column} has {max(fewest, TEST_FIRST + 1)} examples or more"
        )
    row_e = np.sort(np.concatenate(used))
    # Rows of owners that are left out are in neither part.
    train = row_e[~test_e[row_e]]
    return replace(whole, columns={column: owner_e}).split(
        train,
        np.flatnonzero(test_e),
    )


def every_tenth(owned: Sequence[IntArray], num_rows: int) -> BoolArray:
    """Whether a row is for the test: the 5th, 15th, 25th, ... of each owner's."""
    test_e = np.zeros(num_rows, np.bool_)
    for rows in owned:
        test_e[rows[TEST_FIRST::TEST_EVERY]] = True
    return test_e


def rows_by_key(key_e: IntArray) -> list[IntArray]:
    """The rows of each different key, in increasing order of keys and of rows."""
    # Stable, so that the rows of a key stay in their order.
    order = np.argsort(key_e, kind="stable")
    _, start = np.unique(key_e[order], return_index=True)
    return np.split(order, start[1:])


def _pools(label_e: IntArray, rng: np.random.Generator) -> list[IntArray]:
    """The rows of each label that occurs, shuffled."""
    return [rng.permutation(rows) for rows in rows_by_key(label_e)]


def _deal(row_e: IntArray, num_clients: int) -> list[IntArray]:
    """Cut rows in random order into clients whose sizes differ by one at most."""
    return [np.sort(rows) for rows in np.array_split(row_e, num_clients)]
