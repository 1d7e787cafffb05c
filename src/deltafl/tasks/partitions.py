"""Who holds which example: the partitions, and test sets that are cut from the examples of each owner.

============= ============================================= ============= =======================================
name          clients differ in                             sizes         source
============= ============================================= ============= =======================================
iid           nothing                                       equal         -
hsu2019       labels: client i has the mix Dir(alpha prior) equal         Hsu et al. 2019, arXiv:1909.06335
yurochkin2019 labels, sizes: class k is cut by Dir(alpha 1) unequal       Yurochkin et al., ICML 2019
shards        labels: a few of them a client                equal         McMahan et al., AISTATS 2017
split         labels, sizes                                 two           DELTA, NeurIPS 2023, split-FashionMNIST
quantity      sizes: 10 % of the clients own 90 %           two           -
natural       whatever the owners differ in                 the owners'   a column of the data set
writer        handwriting                                   the owners'   the column ``writer``
============= ============================================= ============= =======================================

For all of them: no example belongs to two clients, no client is empty, and the rows of a client are sorted. Every
example belongs to a client, except for N mod m examples with ``hsu2019``, whose clients are equal, and for the owners
that are not drawn with ``natural`` and ``writer``. The suffix ``_e`` stands for examples, ``_c`` for classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import DeltaflError, unknown_name
from ..types import FloatArray, IntArray
from .base import Dataset

#: ``quantity``: 10 % of the clients own 90 % of the data.
SMALL_SHARE = 0.1

#: Of each owner's examples the 5th, 15th, 25th, ... are for the test.
TEST_EVERY, TEST_FIRST = 10, 4


def iid(label_e: IntArray, num_clients: int, rng: np.random.Generator) -> list[IntArray]:
    """Deal the examples at random to 1 <= m <= N clients; sizes differ by one at most."""
    _require_clients(num_clients, len(label_e), "examples")
    return _deal(rng.permutation(len(label_e)), num_clients)


def hsu2019(label_e: IntArray, num_clients: int, alpha: float, rng: np.random.Generator) -> list[IntArray]:
    """Equal clients with label mixes q_i ~ Dir(alpha * prior), where prior are the classes' shares of the data.

    A client draws its N // m examples one after the other, with label ~ q_i and without replacement; when a class is
    used up, q_i is renormalised over the classes that remain. ``alpha``, 1e-6 to 1e6, is the total concentration:
    towards 0 one label a client, towards infinity iid. Over 10 balanced classes the mean share of a client's largest
    class is about 0.94, 0.78, 0.66 for alpha = 0.1, 0.5, 1.

    Source: Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution", arXiv:1909.06335.
    """
    _require_clients(num_clients, len(label_e), "examples")
    _require_alpha(alpha)
    pool_c = _pools(label_e, rng)
    left_c = np.array([len(pool) for pool in pool_c])
    prior_c = left_c / len(label_e)
    size = len(label_e) // num_clients
    clients = []
    for _ in range(num_clients):
        take_c = _draw_labels(left_c, rng.dirichlet(alpha * prior_c), alpha * prior_c, size, rng)
        # The pools are shuffled, so the next take examples of a pool are a random draw from it.
        rows = [pool[left - take : left] for pool, left, take in zip(pool_c, left_c, take_c, strict=True)]
        left_c = left_c - take_c
        clients.append(np.sort(np.concatenate(rows)))
    return clients


def _draw_labels(
    left_c: IntArray, mix_c: FloatArray, concentration_c: FloatArray, size: int, rng: np.random.Generator
) -> IntArray:
    """How many examples of each class one client takes; they sum to ``size`` and never exceed ``left_c``.

    Rejecting a draw from an empty pool and drawing again is the same as renormalising, and it does not matter when the
    rejected ones are drawn again; hence whole multinomials instead of a loop over examples, exact in distribution.
    """
    take_c = np.zeros_like(left_c)
    while (missing := size - int(take_c.sum())) > 0:
        open_c = take_c < left_c
        share_c = np.where(open_c, mix_c, 0.0)
        if share_c.sum() <= 0.0:
            # What remains of q_i was rounded to 0. A part of a Dirichlet, renormalised, is a Dirichlet too.
            share_c[open_c] = rng.dirichlet(concentration_c[open_c])
            mix_c = share_c
        take_c = np.minimum(take_c + rng.multinomial(missing, share_c / share_c.sum()), left_c)
    return take_c


def yurochkin2019(label_e: IntArray, num_clients: int, alpha: float, rng: np.random.Generator) -> list[IntArray]:
    """Unequal clients: class k is cut into m parts with shares ~ Dir(alpha * 1_m), alpha from 1e-6 to 1e6.

    A client without any example (usual with small alpha) is given one, drawn from the client that then has the most.
    For many clients the labels of a client are about Dir(alpha * 1_C); over 10 classes the mean share of a client's
    largest class is about 0.66, 0.38, 0.29 for alpha = 0.1, 0.5, 1, as long as clients hold many examples.

    Source: Yurochkin et al., "Bayesian nonparametric federated learning of neural networks", ICML 2019.
    """
    _require_clients(num_clients, len(label_e), "examples")
    _require_alpha(alpha)
    parts: list[list[IntArray]] = [[] for _ in range(num_clients)]
    for pool in _pools(label_e, rng):
        share_m = rng.dirichlet(np.full(num_clients, alpha))
        cuts = np.rint(np.cumsum(share_m)[:-1] * len(pool)).astype(np.int64)
        for part, rows in zip(parts, np.split(pool, cuts), strict=True):
            part.append(rows)
    clients = [np.sort(np.concatenate(part)) for part in parts]
    size_m = np.array([len(rows) for rows in clients])
    for client in np.flatnonzero(size_m == 0):
        giver = int(np.argmax(size_m))
        given = int(rng.integers(size_m[giver]))
        clients[client] = clients[giver][given : given + 1]
        clients[giver] = np.delete(clients[giver], given)
        size_m[client], size_m[giver] = 1, size_m[giver] - 1
    return clients


def shards(label_e: IntArray, num_clients: int, shards_per_client: int, rng: np.random.Generator) -> list[IntArray]:
    """Sort by label, cut into k m shards of equal size, deal k >= 1 to each client: about k labels a client.

    Source: McMahan et al., "Communication-efficient learning of deep networks", AISTATS 2017.
    """
    if shards_per_client < 1:
        raise DeltaflError(f"shards_per_client is {shards_per_client}; write a whole number >= 1")
    _require_clients(num_clients, len(label_e), "examples")
    num_shards = num_clients * shards_per_client
    if num_shards > len(label_e):
        raise DeltaflError(
            f"{num_clients} clients with {shards_per_client} shards each need {num_shards} examples or more, "
            f"the data set has {len(label_e)}: choose fewer clients or fewer shards"
        )
    piece = np.array_split(np.concatenate(_pools(label_e, rng)), num_shards)
    dealt_mk = rng.permutation(num_shards).reshape(num_clients, shards_per_client)
    return [np.sort(np.concatenate([piece[shard] for shard in shard_k])) for shard_k in dealt_mk]


def split(label_e: IntArray, num_clients: int, rng: np.random.Generator) -> list[IntArray]:
    """Single-label clients of two sizes: one of C labels, drawn at random, is cut into m - C + 1 small clients.

    The other C - 1 labels are one large client each; these come first. With FashionMNIST and m = 109: 9 clients with
    6000 images and 100 clients with 60, so that about 10 % of the clients own 90 % of the data.

    Source: DELTA, NeurIPS 2023, appendix on split-FashionMNIST.
    """
    pool_c = _pools(label_e, rng)
    if num_clients < len(pool_c):
        raise DeltaflError(f"partition 'split' with {num_clients} clients: needs one a label, {len(pool_c)} or more")
    cut = pool_c.pop(int(rng.integers(len(pool_c))))
    num_small = num_clients - len(pool_c)
    if num_small > len(cut):
        raise DeltaflError(
            f"partition 'split' with {num_clients} clients cuts one label into {num_small} clients, but that label "
            f"has {len(cut)} examples: write {len(cut) + len(pool_c)} clients or fewer"
        )
    return [np.sort(pool) for pool in pool_c] + _deal(cut, num_small)


def quantity(label_e: IntArray, num_clients: int, rng: np.random.Generator) -> list[IntArray]:
    """Labels at random, two sizes: the first 10 % of m >= 2 clients (at least one) share 90 % of the data."""
    num_large = max(1, round(SMALL_SHARE * num_clients))
    num_small = num_clients - num_large
    owned_by_small = round(SMALL_SHARE * len(label_e))
    if num_clients < 2 or owned_by_small < num_small:
        raise DeltaflError(
            f"partition 'quantity' with {num_clients} clients shares 10 % of {len(label_e)} examples among "
            f"{num_small} small clients: needs 2 clients or more, and one example for each"
        )
    large, small = np.split(rng.permutation(len(label_e)), [len(label_e) - owned_by_small])
    return _deal(large, num_large) + _deal(small, num_small)


def natural(owner_e: IntArray, num_clients: int, rng: np.random.Generator) -> list[IntArray]:
    """One client for each owner, in increasing order of their ids; of more than m owners, m are drawn at random."""
    clients = _groups(owner_e)
    _require_clients(num_clients, len(clients), "owners")
    if num_clients == len(clients):
        return clients
    return [clients[owner] for owner in np.sort(rng.choice(len(clients), num_clients, replace=False))]


@dataclass(frozen=True)
class Partition:
    """One row of ``PARTITIONS``.

    Attributes:
        summary: One line for ``deltafl tasks``.
        make: ``make(key_e, num_clients, [option], rng)`` with the labels or, for partitions by a column, the owners.
        option: The option that it reads, ``"alpha"`` or ``"shards_per_client"``.
        uses_labels: Whether it needs class labels.
        uses_column: Whether it needs a column of owners.
        column: The name that this column must have; None for any.
    """

    summary: str
    make: Callable[..., list[IntArray]]
    option: str | None = None
    uses_labels: bool = False
    uses_column: bool = False
    column: str | None = None

    @property
    def uses_alpha(self) -> bool:
        """Whether ``alpha`` matters."""
        return self.option == "alpha"


PARTITIONS: dict[str, Partition] = {
    "iid": Partition("examples dealt at random, equal sizes", iid),
    "hsu2019": Partition(
        "labels of a client ~ Dir(alpha * prior), alpha the total concentration; equal sizes",
        hsu2019,
        option="alpha",
        uses_labels=True,
    ),
    "yurochkin2019": Partition(
        "each label cut over the clients by Dir(alpha * 1); unequal sizes",
        yurochkin2019,
        option="alpha",
        uses_labels=True,
    ),
    "shards": Partition(
        "sorted by label, cut into equal shards, a few dealt to each client",
        shards,
        option="shards_per_client",
        uses_labels=True,
    ),
    "split": Partition(
        "one label a client; one label is cut into many small clients: 10 % own 90 %", split, uses_labels=True
    ),
    "quantity": Partition("labels at random; 10 % of the clients own 90 % of the data", quantity),
    "natural": Partition("one client for each owner in a column of the data set", natural, uses_column=True),
    "writer": Partition(
        "one client for each writer, where the data set names them", natural, uses_column=True, column="writer"
    ),
}


def make_partition(
    name: str,
    dataset: Dataset,
    num_clients: int | None,
    alpha: float,
    rng: np.random.Generator,
    column: str | None = None,
    shards_per_client: int = 2,
) -> list[IntArray]:
    """Split a data set's training examples over clients.

    Args:
        name: One of ``PARTITIONS``.
        dataset: The examples.
        num_clients: m; None, for ``natural`` and ``writer`` alone, takes all owners.
        alpha: Concentration, for the Dirichlet partitions.
        rng: Source of randomness, usually ``stream(seed, "partition")``.
        column: The column of owners, for ``natural``; needed only if the data set has several.
        shards_per_client: For ``shards``.

    Returns:
        The rows of each client: m arrays int64, sorted, disjoint, none empty.

    Raises:
        DeltaflError: If the name is unknown, the data set lacks labels or the column, or the numbers are impossible.
    """
    if name not in PARTITIONS:
        raise unknown_name("partition", name, PARTITIONS)
    partition = PARTITIONS[name]
    if partition.uses_labels and dataset.num_classes == 0:
        raise DeltaflError(
            f"partition {name!r} needs class labels, {dataset.name} has none: choose 'iid' or 'quantity'"
        )
    key_e = dataset.columns[owner_column(name, dataset, column)] if partition.uses_column else dataset.train_y
    if num_clients is None:
        if not partition.uses_column:
            raise DeltaflError(f"partition {name!r} needs a number of clients; only 'natural' has its own")
        num_clients = len(np.unique(key_e))
    options = {"alpha": alpha, "shards_per_client": shards_per_client}
    arguments = [] if partition.option is None else [options[partition.option]]
    return partition.make(key_e, num_clients, *arguments, rng)


def owner_column(name: str, dataset: Dataset, column: str | None) -> str:
    """The name of the column of owners that ``natural`` or ``writer`` uses.

    Raises:
        DeltaflError: If the data set has no such column, or several and none is named.
    """
    only = PARTITIONS[name].column
    if only is not None and column not in {None, only}:
        raise DeltaflError(f"partition {name!r} goes by the column {only!r}, not {column!r}: leave the column out")
    column = only or column
    if not dataset.columns or (only is not None and only not in dataset.columns):
        raise DeltaflError(
            f"partition {name!r} needs {f'the column {only!r}' if only else 'a column of owners'}, which "
            f"{dataset.name} lacks: choose another partition"
        )
    if column is None and len(dataset.columns) > 1:
        raise DeltaflError(f"{dataset.name} has several columns of owners: give one of {', '.join(dataset.columns)}")
    column = column or next(iter(dataset.columns))
    if column not in dataset.columns:
        raise unknown_name("column", column, dataset.columns)
    return column


def clients_of(owner_e: IntArray, client_rows: Sequence[IntArray], other_e: IntArray) -> IntArray:
    """The client of each further example, such as a test example: the one whose examples have the same owner.

    Args:
        owner_e: (N,) the owner of each training example.
        client_rows: m arrays of rows, each with the examples of one owner, as ``natural`` returns them.
        other_e: (N',) the owner of each further example.

    Returns:
        int64 (N',); -1 where the owner is no client.
    """
    client_of = {int(owner_e[rows[0]]): client for client, rows in enumerate(client_rows)}
    return np.array([client_of.get(int(owner), -1) for owner in other_e], dtype=np.int64)


def hold_out_by_owner(
    whole: Dataset, column: str, owner_e: IntArray, fewest: int = 1, most: int | None = None
) -> Dataset:
    """Cut a test set from the examples of each owner; deterministic, hence the same for every seed.

    Owners with fewer than ``fewest`` examples are left out; of the others the first ``most`` examples are used, in the
    order in which they are stored. Of these the 5th, 15th, 25th, ... are for the test, the rest for training.

    Args:
        whole: A data set with all its examples in the training part.
        column: Name of the column of owners.
        owner_e: (N,) int64, the owner of each example.
        fewest: >= 1.
        most: >= 1, or None for all.

    Raises:
        DeltaflError: If no owner has an example for the test.
    """
    parts: dict[bool, list[IntArray]] = {False: [np.arange(0)], True: [np.arange(0)]}
    for rows in _groups(owner_e):
        if len(rows) >= fewest:
            used = rows[:most]
            is_test = np.arange(len(used)) % TEST_EVERY == TEST_FIRST
            parts[False].append(used[~is_test])
            parts[True].append(used[is_test])
    train, test = (np.sort(np.concatenate(part)) for part in parts.values())
    if len(test) == 0:
        raise DeltaflError(f"{whole.name}: no {column} has {max(fewest, TEST_FIRST + 1)} examples or more")
    return replace(
        whole,
        train_x=whole.train_x[train],
        train_y=whole.train_y[train],
        test_x=whole.train_x[test],
        test_y=whole.train_y[test],
        columns={column: owner_e[train]},
        test_columns={column: owner_e[test]},
    )


def _groups(key_e: IntArray) -> list[IntArray]:
    """The rows of each different key, in increasing order of keys and of rows."""
    order = np.argsort(key_e, kind="stable")
    _, start = np.unique(key_e[order], return_index=True)
    return np.split(order, start[1:])


def _pools(label_e: IntArray, rng: np.random.Generator) -> list[IntArray]:
    """The rows of each label that occurs, shuffled."""
    return [rng.permutation(rows) for rows in _groups(label_e)]


def _deal(row_e: IntArray, num_clients: int) -> list[IntArray]:
    """Cut rows in random order into clients whose sizes differ by one at most."""
    return [np.sort(rows) for rows in np.array_split(row_e, num_clients)]


def _require_clients(num_clients: int, available: int, what: str) -> None:
    if not 1 <= num_clients <= available:
        raise DeltaflError(
            f"{num_clients} clients, but there are {available} {what}: write a number from 1 to {available}"
        )


def _require_alpha(alpha: float) -> None:
    """Outside of this range, and with NaN, a Dirichlet sample is rounded away."""
    if not 1e-6 <= alpha <= 1e6:
        raise DeltaflError(f"alpha is {alpha}; write a number from 1e-6 (one label a client) to 1e6 (iid)")
