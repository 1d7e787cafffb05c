"""Who holds which example: the partitions.

No example belongs to two clients, no client is empty, and the rows of a client are sorted. Every
example belongs to a client, except for N mod m of them with ``hsu2019``, whose clients are equal,
and for owners that are not drawn. The suffix ``_e`` stands for examples, ``_c`` for classes.

A partition is said as text, ``name`` or ``name(option=value)``. Users bring two other kinds: a
function, also as ``FILE.py:FUNCTION``, and an object that deals a ``datasets.Dataset``, as the
partitioners of ``flwr_datasets`` do.
"""

import copy
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from reprlib import repr as shown
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from ..calls import Named, parse_call
from ..errors import DeltaflError, counted, entry, explained, is_in, require, unknown_name
from ..store.own_python import load_function
from ..types import FloatArray, IntArray, Rng
from .dataset import Dataset

#: A partition's text, a function ``(y, num_clients, rng)`` that returns each client's rows, or an
#: object with ``dataset``, ``num_partitions`` and ``load_partition(k)``.
AnyPartition: TypeAlias = str | Any

#: ``quantity``: 10 % of the clients own 90 % of the data.
SMALL_SHARE = 0.1


def iid(
    label_e: IntArray,
    num_clients: int,
    rng: Rng,
) -> list[IntArray]:
    """Deal the examples at random; sizes differ by one at most."""
    return _deal(rng.permutation(len(label_e)), num_clients)


def hsu2019(
    label_e: IntArray,
    num_clients: int,
    alpha: float,
    rng: Rng,
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
    left_c: IntArray,
    concentration_c: FloatArray,
    size: int,
    rng: Rng,
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
    label_e: IntArray,
    num_clients: int,
    alpha: float,
    rng: Rng,
) -> list[IntArray]:
    """Unequal clients: class k is cut into m parts with shares ~ Dir(alpha * 1_m).

    A client without any example (usual with small alpha) is given one, drawn from the client that
    then has the most. For many clients that hold many examples the labels of a client are about
    Dir(alpha * 1_C): over 10 classes the mean share of its largest class is about 0.66, 0.38, 0.29
    for alpha = 0.1, 0.5, 1 (Yurochkin et al., ICML 2019).
    """
    client_e = np.empty(len(label_e), np.int64)
    for pool in _pools(label_e, rng):
        share_m = rng.dirichlet(np.full(num_clients, alpha))
        # Sums are rounded, not shares: so each example is in one part, and none is lost.
        cuts = np.rint(np.cumsum(share_m)[:-1] * len(pool)).astype(np.int64)
        taken_m = np.diff(cuts, prepend=0, append=len(pool))
        client_e[pool] = np.repeat(np.arange(num_clients), taken_m)
    return with_least(_held(client_e, num_clients), 1, rng)


def with_least(
    clients: Sequence[IntArray],
    least: int,
    rng: Rng,
) -> list[IntArray]:
    """The clients with ``least`` rows or more each: who has fewer is given rows, one at a time,
    each drawn from the client that then has the most.
    """
    num_rows = sum(map(len, clients))
    if least * len(clients) > num_rows:
        raise DeltaflError(
            f"min_size is {least}; {counted(len(clients), 'client shares', 'clients share')} "
            f"{counted(num_rows, 'example')}: write "
            f""
            f"{num_rows // len(clients)} or less"
        )
    filled = list(clients)
    short = [client for client, rows in enumerate(clients) if len(rows) < least]
    # Of equal ones the first gives. Who was short never does: somebody has more until all are
    # filled.
    heap = [(-len(rows), client) for client, rows in enumerate(clients) if len(rows) > least]
    heapq.heapify(heap)
    left: dict[int, list[int]] = {}
    for client in short:
        own = clients[client].tolist()
        while len(own) < least:
            # Sizes are negative, as a heap has the smallest first.
            size, giver = heap[0]
            # Once: it may give to thousands, and a list of its rows takes as long as it has rows.
            if giver not in left:
                left[giver] = clients[giver].tolist()
            own.append(left[giver].pop(int(rng.integers(-size))))
            heapq.heapreplace(heap, (size + 1, giver))
        left[client] = sorted(own)
    for client, rows in left.items():
        filled[client] = np.array(rows, np.int64)
    return filled


def k_classes(
    label_e: IntArray,
    num_clients: int,
    rng: Rng,
    k: int = 2,
) -> list[IntArray]:
    """Every client has examples of exactly k classes, and each class is dealt equally to the
    clients that have it.

    A client takes the k classes that the fewest have so far, at random among equals; so classes
    differ by one client at most (the "#C = k" of Li et al., ICDE 2022, where few classes are left
    out).
    """
    pool_c = _pools(label_e, rng)
    classes = len(pool_c)
    if not 1 <= k <= classes <= k * num_clients:
        raise DeltaflError(
            f"partition 'k-classes' got k = {k} and {num_clients} clients; {classes} classes "
            f"need a k from {min(classes, -(-classes // num_clients))} to {classes}"
        )
    holders_c: list[list[int]] = [[] for _ in pool_c]
    for client in range(num_clients):
        held_c = np.array([len(holders) for holders in holders_c])
        # The last key counts first; the random one decides among classes that equally many hold.
        for label in np.lexsort((rng.random(classes), held_c))[:k]:
            holders_c[label].append(client)
    client_e = np.empty(len(label_e), np.int64)
    for pool, holders in zip(pool_c, holders_c, strict=True):
        if len(pool) < len(holders):
            raise DeltaflError(
                f"partition 'k-classes' got k = {k} and {num_clients} clients; {len(holders)} of "
                f"them would share the {len(pool)} examples of one class: write fewer clients"
            )
        for client, rows in zip(holders, np.array_split(pool, len(holders)), strict=True):
            client_e[rows] = client
    return _held(client_e, num_clients)


def shards(
    label_e: IntArray,
    num_clients: int,
    rng: Rng,
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
    rng: Rng,
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
    rng: Rng,
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
    rng: Rng,
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

    ``make(key_e, num_clients, rng=rng, [alpha=alpha])`` takes the labels or, for partitions by a
    column, the owners; ``column`` is the name that this column must have, None for any. ``options``
    are its own, whole numbers, with what they are unless they are set: ``min_size`` is the least
    number of examples of a client, all others are arguments of ``make``. That of a partitioner
    (``deals_dataset``) is ``make(dataset, num_clients, label)``.
    """

    summary: str
    make: Callable[..., list[IntArray]]
    uses_labels: bool = False
    uses_alpha: bool = False
    uses_column: bool = False
    column: str | None = None
    options: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({"min_size": 1}))
    deals_dataset: bool = False

    @property
    def knows_clients(self) -> bool:
        """Whether it says itself how many clients there are."""
        return self.uses_column or self.deals_dataset


_by_label = partial(Partition, uses_labels=True)
_dirichlet = partial(_by_label, uses_alpha=True)
_by_owner = partial(Partition, make=natural, uses_column=True, options={})
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
        options={},
    ),
    "k-classes": _by_label(
        "k classes a client, k-classes(k=2); each dealt equally to those who have it",
        k_classes,
        options={"k": 2},
    ),
    "split": _by_label(
        "one label a client, one of them cut into many small clients",
        split,
        options={},
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


def partition_name(given: AnyPartition) -> AnyPartition:
    """A partitioner or a function as text that carries it; what is none stays as it is."""
    if isinstance(given, str) or not (hasattr(given, "load_partition") or callable(given)):
        return given
    return Named(getattr(given, "__name__", type(given).__name__), given)


def find_partition(text: AnyPartition) -> Partition:
    """The partition that a text, or an object, stands for, with its options."""
    named = partition_name(text)
    if not isinstance(named, str):
        raise DeltaflError(
            f"partition is of type {type(named).__name__}; it must be a name such as 'iid', a "
            "function (y, num_clients, rng) or a partitioner of flwr_datasets; who holds a row of "
            "a table may stand in a column of it"
        )
    own = partial(Partition, f"dealt by {named}", options={})
    if isinstance(named, Named):
        if isinstance(named.of, type):
            raise DeltaflError(
                f"partition is the class {named}; give one of its objects, such as "
                f"{named}(num_partitions=20)"
            )
        if hasattr(named.of, "load_partition"):
            return own(partial(_dealt, named.of), deals_dataset=True)
        return own(partial(_by_function, named.of, named))
    name, options = parse_call(named)
    if ".py:" in name:
        form = "--partition FILE.py:FUNCTION"
        function = partial(load_function(name, form, "(y, num_clients, rng)"), **options)
        return own(partial(_by_function, function, named))
    partition = entry("partition", name, PARTITIONS, "FILE.py:FUNCTION")
    for option, value in options.items():
        if option not in partition.options:
            if not partition.options:
                raise DeltaflError(f"{name!r} has no options; leave out {option!r}")
            raise unknown_name("option", option, partition.options, of=name)
        if type(value) is not int or value < 1:
            raise DeltaflError(
                f"{option} of {name!r} is {value!r}; it must be a whole number of 1 or more"
            )
    return replace(partition, options={**partition.options, **options})


def make_partition(
    name: AnyPartition,
    dataset: Dataset,
    num_clients: int | None,
    alpha: float,
    rng: Rng,
    column: str | None = None,
    label: str = "label",
) -> list[IntArray]:
    """Split a data set's training examples over clients: m arrays of rows, int64, sorted, disjoint,
    none empty.

    ``name`` is one of ``PARTITIONS``, perhaps with options, ``dirichlet(min_size=5)``, a function
    ``(y, num_clients, rng)``, ``FILE.py:FUNCTION`` or a partitioner. ``num_clients`` None takes all
    owners, with ``natural`` and ``writer`` alone, or as many as a partitioner deals to. ``alpha``,
    from 1e-6 (one label a client) to 1e6 (iid), is the concentration of the Dirichlet partitions.
    ``column`` is that of the owners, needed if the data set has several. A partitioner finds the
    labels as the column ``label``, and owners by their columns' names.

    Raises:
        DeltaflError: If the name is unknown, the data set lacks labels or the column, or the
            numbers are impossible.
    """
    name = partition_name(name)
    partition = find_partition(name)
    if column is not None and not partition.uses_column:
        raise DeltaflError(
            f"partition {name!r} deals the rows, and column {column!r} says who holds them: leave "
            "one of them out"
        )
    if partition.deals_dataset:
        return partition.make(dataset, num_clients, label)
    has_class = dataset.num_classes > 0 and dataset.train_y.ndim == 1
    if partition.uses_labels and not has_class:
        raise DeltaflError(
            f"partition {name!r} needs one class a row, and this task has none: choose 'iid' or "
            "'quantity'"
        )
    # Beyond these numbers a Dirichlet sample is rounded away.
    if partition.uses_alpha and not is_in(alpha, "[1e-6, 1e6]"):
        raise DeltaflError(
            f"alpha is {alpha!r}; write a number from 1e-6 (one label a client) to 1e6 (iid)"
        )
    key_e = dataset.train_y
    most = len(key_e)
    if partition.uses_column:
        key_e = dataset.columns[owner_column(name, dataset, column)]
        most = len(np.unique(key_e))
        if num_clients is None:
            num_clients = most
    if num_clients is None or num_clients not in range(1, most + 1):
        raise DeltaflError(
            f"partition {name!r} got {num_clients!r} clients; write a number from 1 to {most}, "
            "such as clients=20, or --clients 20"
        )
    num_clients = int(num_clients)  # 20.0 is 20
    options: dict[str, Any] = dict(partition.options)
    least = options.pop("min_size", 1)
    if partition.uses_alpha:
        options["alpha"] = alpha
    clients = partition.make(key_e, num_clients, rng=rng, **options)
    return with_least(clients, least, rng)


def _by_function(
    function: Callable[..., Any],
    name: str,
    label_e: IntArray,
    num_clients: int,
    rng: Rng,
) -> list[IntArray]:
    """The rows that a user's function gives to each client."""
    from .draws import seeded

    who = f"the partition {name}"
    # What it draws from NumPy's own generator follows the seed, too.
    with explained(f"{who} failed"), seeded(rng):
        found = function(label_e.copy(), num_clients, rng)
        if isinstance(found, Mapping):  # as much code for research does it, often with sets
            found = [found[client] for client in range(len(found))]
        given = [[*rows] for rows in found]
    if len(given) != num_clients:
        raise DeltaflError(
            f"{who} deals to {counted(len(given), 'client')}, and clients is {num_clients}: let it "
            "return the rows of so many, or set clients"
        )
    return _disjoint(who, given, len(label_e))


def _disjoint(who: str, given: Sequence[Any], total: int) -> list[IntArray]:
    """The rows of each client as somebody else gives them, sorted and checked."""
    needed = f"row numbers from 0 to {total - 1}, one at least"
    for client, rows in enumerate(given):
        if not are_rows(rows, total):
            raise DeltaflError(f"{who} gives client {client} {shown(rows)}; it must be {needed}")
    parts = [np.sort(np.asarray(rows)).astype(np.int64) for rows in given]
    row, count = np.unique(np.concatenate(parts), return_counts=True)
    if count.max() > 1:
        raise DeltaflError(
            f"{who} deals row {row[count.argmax()]} {count.max()} times; let one client have it"
        )
    return parts


def are_rows(rows: Any, total: int) -> bool:
    """Whether these are numbers of so many rows, one at least."""
    # Of booleans among numbers NumPy would make 0 and 1.
    if isinstance(rows, list | tuple) and any(isinstance(row, bool | np.bool_) for row in rows):
        return False
    try:
        row_n = np.asarray(rows)
    except ValueError:  # lists of different lengths
        return False
    good = row_n.ndim == 1 and row_n.size > 0 and row_n.dtype.kind in "iu"
    return bool(good and row_n.min() >= 0 and row_n.max() < total)


def _dealt(
    partitioner: Any,
    dataset: Dataset,
    num_clients: int | None,
    label: str,
) -> list[IntArray]:
    """The rows that a partitioner of ``datasets.Dataset`` gives to each client."""
    require("datasets", "data")
    import datasets

    name = type(partitioner).__name__
    # A partitioner returns examples, not their numbers: a column that no table has carries these.
    row = "row of deltafl"
    columns = {label: dataset.train_y, **dataset.columns, row: np.arange(len(dataset.train_y))}
    with explained(f"the partitioner {name} failed on the columns {', '.join(columns)}"):
        # A copy, for a partitioner takes its data set once, and a task is made for each seed.
        own = copy.deepcopy(partitioner)
        own.dataset = datasets.Dataset.from_dict(columns)
        given = [own.load_partition(k)[row] for k in range(own.num_partitions)]
        parts = [[*rows] for rows in given]
    if num_clients not in (None, len(parts)):
        raise DeltaflError(
            f"the partitioner {name} deals to {counted(len(parts), 'client')}, and clients is "
            f"{num_clients}: leave it out"
        )
    empty = [k for k, rows in enumerate(parts) if not rows]
    if empty:
        raise DeltaflError(
            f"the partitioner {name} gives client {empty[0]} no example; let it deal to fewer "
            "clients, or raise its min_partition_size"
        )
    return _disjoint(f"the partitioner {name}", parts, len(dataset.train_y))


def owner_column(name: AnyPartition, dataset: Dataset, column: str | None) -> str:
    """The name of the column of owners that ``natural`` or ``writer`` uses."""
    needed = find_partition(name).column
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
    name: AnyPartition,
    dataset: Dataset,
    column: str | None,
    client_rows: Sequence[IntArray],
) -> IntArray | None:
    """The client of each test example, -1 where its owner is none; None where owners are unknown,
    or the partition does not ask for them.
    """
    if not find_partition(name).uses_column:
        return None
    owner = owner_column(name, dataset, column)
    if owner not in dataset.test_columns:
        return None
    owner_e = dataset.columns[owner]
    # By a client's first row: all of its rows have one owner.
    client_of = {int(owner_e[rows[0]]): client for client, rows in enumerate(client_rows)}
    test_owners = dataset.test_columns[owner].tolist()
    return np.array([client_of.get(owner, -1) for owner in test_owners], np.int64)


def rows_by_key(key_e: IntArray) -> list[IntArray]:
    """The rows of each different key, in increasing order of keys and of rows."""
    # Stable, so that the rows of a key stay in their order.
    order = np.argsort(key_e, kind="stable")
    _, start = np.unique(key_e[order], return_index=True)
    return np.split(order, start[1:])


def _pools(label_e: IntArray, rng: Rng) -> list[IntArray]:
    """The rows of each label that occurs, shuffled."""
    return [rng.permutation(rows) for rows in rows_by_key(label_e)]


def _held(client_e: IntArray, num_clients: int) -> list[IntArray]:
    """The rows of each client, in increasing order; ``client_e`` says whose a row is."""
    order = np.argsort(client_e, kind="stable")
    size_m = np.bincount(client_e, minlength=num_clients)
    return np.split(order, np.cumsum(size_m)[:-1])


def _deal(row_e: IntArray, num_clients: int) -> list[IntArray]:
    """Cut rows in random order into clients whose sizes differ by one at most."""
    return [np.sort(rows) for rows in np.array_split(row_e, num_clients)]
