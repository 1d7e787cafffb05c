"""The partitions as functions of labels and a generator; ``partition.py`` has the table of them.

Each returns the rows of each client: m arrays int64, sorted, disjoint, none empty. The letter ``e`` stands
for examples.
"""

from collections.abc import Sequence

import numpy as np

from ..errors import DeltaflError
from ..types import FloatArray, IntArray

#: ``quantity``: 10 % of the clients own 90 % of the data.
SMALL_SHARE = 0.1


def iid(label_e: IntArray, num_clients: int, rng: np.random.Generator) -> list[IntArray]:
    """Deal the examples at random; sizes differ by one at most.

    Args:
        label_e: (N,); only its length counts.
        num_clients: m, 1 <= m <= N.
        rng: Source of the random order.

    Returns:
        m arrays of rows.

    Raises:
        DeltaflError: If there are more clients than examples.
    """
    _require(num_clients, len(label_e), "examples")
    return _deal(rng.permutation(len(label_e)), num_clients)


def hsu2019(label_e: IntArray, num_clients: int, alpha: float, rng: np.random.Generator) -> list[IntArray]:
    """Equal clients with own label mixes q_i ~ Dir(alpha * prior), prior the classes' shares of the data.

    ``alpha`` is the total concentration. A client draws its N // m examples one after the other, with label ~
    q_i and without replacement; when a class is used up, q_i is renormalised over the classes that are left.
    N mod m examples are left out. Over 10 balanced classes the mean share of a client's largest class is
    about 0.94, 0.78, 0.66 for alpha = 0.1, 0.5, 1.

    Args:
        label_e: (N,) class labels.
        num_clients: m, 1 <= m <= N.
        alpha: Total concentration, 1e-6 to 1e6; towards 0 one label a client, towards infinity iid.
        rng: Source of randomness.

    Returns:
        m arrays of N // m rows.

    Raises:
        DeltaflError: If there are more clients than examples or alpha is out of range.

    Source: Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution", arXiv:1909.06335.
    """
    _require(num_clients, len(label_e), "examples")
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
    """How many examples of each class one client takes: they sum to ``size`` and are never above ``left_c``.

    Refusing a draw from an empty pool and drawing again is the same as renormalising, and it does not matter
    when the refused ones are drawn again; hence whole multinomials instead of a loop over examples, exact in
    law.
    """
    take_c = np.zeros_like(left_c)
    while (missing := size - int(take_c.sum())) > 0:
        open_c = take_c < left_c
        share_c = np.where(open_c, mix_c, 0.0)
        if share_c.sum() <= 0.0:
            # All that is left of q_i was rounded to 0. A part of a Dirichlet, renormalised, is one itself.
            share_c[open_c] = rng.dirichlet(concentration_c[open_c])
            mix_c = share_c
        take_c = np.minimum(take_c + rng.multinomial(missing, share_c / share_c.sum()), left_c)
    return take_c


def yurochkin2019(label_e: IntArray, num_clients: int, alpha: float, rng: np.random.Generator) -> list[IntArray]:
    """Unequal clients: class k is cut into m parts with shares ~ Dir(alpha * 1_m).

    A client without any example (usual with small alpha) is given one, taken at random from the client who
    then has the most. For many clients the labels of a client are about Dir(alpha * 1_C); over 10 classes the
    mean share of a client's largest class is about 0.66, 0.38, 0.29 for alpha = 0.1, 0.5, 1, as long as
    clients hold many examples.

    Args:
        label_e: (N,) class labels.
        num_clients: m, 1 <= m <= N.
        alpha: Concentration per client, 1e-6 to 1e6.
        rng: Source of randomness.

    Returns:
        m arrays of rows, each with at least one.

    Raises:
        DeltaflError: If there are more clients than examples or alpha is out of range.

    Source: Yurochkin et al., "Bayesian nonparametric federated learning of neural networks", ICML 2019.
    """
    _require(num_clients, len(label_e), "examples")
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
    """Sort by label, cut into k m shards of equal size, deal k to each client: about k labels a client.

    Args:
        label_e: (N,) class labels.
        num_clients: m.
        shards_per_client: k >= 1, with k m <= N.
        rng: Shuffles the examples of a label, and deals.

    Returns:
        m arrays of rows; shards differ by one example at most.

    Raises:
        DeltaflError: If k < 1 or there are more shards than examples.

    Source: McMahan et al., "Communication-efficient learning of deep networks", AISTATS 2017.
    """
    if shards_per_client < 1:
        raise DeltaflError(f"shards_per_client is {shards_per_client}; write a whole number >= 1")
    _require(num_clients, len(label_e), "examples")
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
    """Single-label clients of two sizes: one label, chosen at random, is cut into m - C + 1 small clients.

    The other C - 1 labels are one large client each; these come first. With FashionMNIST and m = 109: 9
    clients with 6000 images and 100 clients with 60, so that about 10 % of the clients own 90 % of the data.

    Args:
        label_e: (N,) class labels, C different ones.
        num_clients: m >= C.
        rng: Chooses the label that is cut, and shuffles it.

    Returns:
        m arrays of rows.

    Raises:
        DeltaflError: If m < C, or the chosen label has fewer than m - C + 1 examples.

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
    """Two sizes, labels at random: the first 10 % of the clients (at least one) share 90 % of the data.

    Args:
        label_e: (N,); only its length counts.
        num_clients: m >= 2.
        rng: Source of the random order.

    Returns:
        m arrays of rows, the large clients first.

    Raises:
        DeltaflError: If m < 2, or 10 % of the data are not enough for one example a small client.
    """
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
    """One client for each owner, in increasing order of the owners' ids.

    Args:
        owner_e: (N,) the owner of each example.
        num_clients: m. Fewer than there are owners: m of them are chosen at random and the others' examples
            left out.
        rng: Chooses the owners; not used when all take part.

    Returns:
        m arrays of rows.

    Raises:
        DeltaflError: If there are fewer than m owners.
    """
    clients = _groups(owner_e)
    _require(num_clients, len(clients), "owners")
    if num_clients == len(clients):
        return clients
    return [clients[owner] for owner in np.sort(rng.choice(len(clients), num_clients, replace=False))]


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


def _require(num_clients: int, available: int, what: str) -> None:
    """Refuse numbers of clients that would leave a client empty."""
    if not 1 <= num_clients <= available:
        raise DeltaflError(
            f"{num_clients} clients, but there are {available} {what}: write a number from 1 to {available}"
        )


def _require_alpha(alpha: float) -> None:
    """Refuse a concentration where a Dirichlet sample is rounded away, NaN included."""
    if not 1e-6 <= alpha <= 1e6:
        raise DeltaflError(f"alpha is {alpha}; write a number from 1e-6 (one label a client) to 1e6 (iid)")
