"""Partitions: what holds for all, the published shares, and each one's own shape."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafl.errors import DeltaflError
from deltafl.simulation.comparisons.comparing import run_comparison
from deltafl.simulation.settings import CompareSettings, make_settings
from deltafl.store.own_python import forget_edited
from deltafl.streams import stream
from deltafl.tasks import PARTITIONS, Dataset, make_partition
from deltafl.tasks.partitions import (
    hsu2019,
    natural,
    quantity,
    shards,
    split,
    with_least,
    yurochkin2019,
)
from deltafl.types import IntArray


def make_dataset(label_e: IntArray, num_classes: int = 10, **columns: IntArray) -> Dataset:
    x = np.zeros((len(label_e), 1), np.float32)
    return Dataset("made up", x, label_e, x[:1], label_e[:1], num_classes, columns)


def balanced(num_examples: int, num_classes: int = 10) -> IntArray:
    return np.arange(num_examples) % num_classes


def majority_share(label_e: IntArray, clients: list[IntArray]) -> float:
    return float(np.mean([np.bincount(label_e[rows]).max() / len(rows) for rows in clients]))


@given(
    name=st.sampled_from(sorted(PARTITIONS)),
    label=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    num_clients=st.integers(1, 30),
    log_alpha=st.floats(-6, 6),
    seed=st.integers(0, 1000),
)
def test_no_example_twice_no_client_empty(
    name: str, label: list[int], num_clients: int, log_alpha: float, seed: int
) -> None:
    label_e = np.array(label)
    dataset = make_dataset(label_e, 5, writer=label_e // 2)
    try:
        clients = make_partition(
            name, dataset, num_clients, 10.0**log_alpha, stream(seed, "partition")
        )
    except DeltaflError as error:
        assert str(num_clients) in str(error)
        return
    again = make_partition(name, dataset, num_clients, 10.0**log_alpha, stream(seed, "partition"))
    assert all(map(np.array_equal, clients, again))
    rows = np.concatenate(clients)
    assert len(clients) == num_clients
    assert min(map(len, clients)) >= 1
    assert len(np.unique(rows)) == len(rows)
    assert all(client.dtype == np.int64 and (np.diff(client) > 0).all() for client in clients)
    left_out = len(label_e) - len(rows)
    if name == "hsu2019":
        assert left_out == len(label_e) % num_clients
        assert {len(client) for client in clients} == {len(label_e) // num_clients}
    elif not PARTITIONS[name].uses_column:
        assert left_out == 0
    if name == "iid":
        assert np.ptp([len(client) for client in clients]) <= 1


@pytest.mark.parametrize(
    ("alpha", "hsu", "yurochkin"), [(0.1, 0.94, 0.66), (0.5, 0.78, 0.38), (1.0, 0.66, 0.29)]
)
def test_majority_shares_of_the_two_dirichlet_partitions(
    alpha: float, hsu: float, yurochkin: float
) -> None:
    # The literature's numbers. The margin is for class pools that run out (hsu2019) and 6 x 300
    # clients.
    label_e = balanced(30_000)
    for deal, share, margin in ((hsu2019, hsu, 0.03), (yurochkin2019, yurochkin, 0.02)):
        dealt = [deal(label_e, 300, alpha, stream(seed, "partition")) for seed in range(6)]
        assert np.mean([majority_share(label_e, clients) for clients in dealt]) == pytest.approx(
            share, abs=margin
        )


def hsu_example_by_example(
    label_e: IntArray, num_clients: int, alpha: float, rng: np.random.Generator
) -> list[list[int]]:
    """The paper's words, one example at a time: the slow reference."""
    pool = [list(np.flatnonzero(label_e == k)) for k in range(label_e.max() + 1)]
    prior = np.array([len(rows) for rows in pool]) / len(label_e)
    clients: list[list[int]] = []
    for _ in range(num_clients):
        mix = rng.dirichlet(alpha * prior)
        rows = []
        for _ in range(len(label_e) // num_clients):
            mix = np.where([len(rows) > 0 for rows in pool], mix, 0)
            mix = mix / mix.sum()
            k = rng.choice(len(mix), p=mix)
            rows.append(int(pool[k].pop(rng.integers(len(pool[k])))))
        clients.append(rows)
    return clients


def test_hsu2019_has_the_law_of_drawing_example_by_example() -> None:
    # The same statistics of both, for the first and the last client, whose pools are nearly empty.
    # 800 repetitions: the standard error of a mean share is below 0.012, of the difference below
    # 0.017.
    label_e = np.repeat([0, 1, 2], [12, 6, 6])
    repetitions = 800

    def shares(
        deal: Callable[..., list[IntArray]] | Callable[..., list[list[int]]], seed: int
    ) -> IntArray:
        rng = np.random.default_rng(seed)
        dealt = [deal(label_e, 4, 2.0, rng) for _ in range(repetitions)]
        counts = [
            [np.bincount(label_e[rows], minlength=3) for rows in clients] for clients in dealt
        ]
        return np.array(counts)

    fast = shares(hsu2019, 1)
    slow = shares(hsu_example_by_example, 2)
    assert np.abs(fast.mean(0) / 6 - slow.mean(0) / 6).max() < 0.06
    assert np.abs((fast == 6).mean(0) - (slow == 6).mean(0)).max() < 0.07


def test_yurochkin2019_sizes_differ_and_shares_are_those_of_the_dirichlet() -> None:
    # The size of a client's part of one class is N_k Beta(a, (m - 1) a): variance (m - 1) / (m^2 (m
    # a + 1)).
    label_e = np.zeros(1000, np.int64)
    share = [
        len(yurochkin2019(label_e, 5, 0.5, stream(seed, "partition"))[0]) / 1000
        for seed in range(1500)
    ]
    assert np.mean(share) == pytest.approx(1 / 5, abs=0.02)
    assert np.var(share) == pytest.approx(4 / (25 * 3.5), rel=0.12)


def test_yurochkin2019_gives_an_empty_client_one_example_of_the_largest() -> None:
    clients = yurochkin2019(balanced(200, 2), 50, 1e-4, stream(0, "partition"))
    sizes = sorted(len(rows) for rows in clients)
    # With so small an alpha each of the two classes goes to one client; all the others would have
    # none.
    assert sizes[:48] == [1] * 48
    assert sum(sizes) == 200


def test_shards_give_two_labels_a_client() -> None:
    label_e = balanced(6000)
    clients, other = (shards(label_e, 100, stream(seed, "partition")) for seed in (0, 1))
    assert not all(map(np.array_equal, clients, other))
    assert {len(rows) for rows in clients} == {60}
    assert {len(np.unique(label_e[rows])) for rows in clients} == {1, 2}


def test_split_of_ten_balanced_classes_is_the_papers() -> None:
    label_e = balanced(60_000)
    clients = split(label_e, 109, stream(0, "partition"))
    assert [len(rows) for rows in clients] == [6000] * 9 + [60] * 100
    assert {len(np.unique(label_e[rows])) for rows in clients} == {1}
    assert len({int(label_e[rows[0]]) for rows in clients[9:]}) == 1
    cut = {
        int(label_e[split(label_e, 109, stream(seed, "partition"))[-1][0]]) for seed in range(40)
    }
    assert len(cut) >= 9  # 40 draws miss a given label with probability 0.015


def test_quantity_gives_ninety_percent_to_ten_percent() -> None:
    clients = quantity(balanced(6000), 100, stream(0, "partition"))
    assert [len(rows) for rows in clients[:10]] == [540] * 10
    assert sum(len(rows) for rows in clients[10:]) == 600


def test_natural_goes_by_owner_and_can_choose_some() -> None:
    owner_e = np.array([7, 3, 7, 9, 3, 7])
    everyone = natural(owner_e, 3, stream(0, "partition"))
    assert [rows.tolist() for rows in everyone] == [[1, 4], [0, 2, 5], [3]]
    dataset = make_dataset(np.zeros(6, np.int64), 1, writer=owner_e)
    assert len(make_partition("natural", dataset, None, 0.1, stream(0, "partition"))) == 3
    chosen = [
        make_partition("natural", dataset, 2, 0.1, stream(seed, "partition")) for seed in range(30)
    ]
    assert {len(clients) for clients in chosen} == {2}
    assert len({tuple(len(rows) for rows in clients) for clients in chosen}) == 3


LABEL_E = balanced(20)
PLAIN = make_dataset(LABEL_E)
ONE = make_dataset(LABEL_E, city=LABEL_E)
TWO = make_dataset(LABEL_E, writer=LABEL_E, city=LABEL_E)


@pytest.mark.parametrize(
    ("name", "data", "num_clients", "alpha", "column", "words"),
    [
        ("hsu", PLAIN, 4, 0.1, None, "did you mean 'hsu2019'"),
        ("iid", PLAIN, 21, 0.1, None, "'iid' got 21 clients; write a number from 1 to 20"),
        ("iid", PLAIN, None, 0.1, None, "None clients"),
        ("iid", ONE, 2, 0.1, "city", "column 'city' says who holds them: leave one of them out"),
        ("natural", ONE, 11, 0.1, None, "got 11 clients; write a number from 1 to 10"),
        ("hsu2019", PLAIN, 4, 0.0, None, "alpha is 0.0"),
        ("shards", PLAIN, 11, 0.1, None, "need 22 examples"),
        ("shards", make_dataset(LABEL_E, 0), 2, 0.1, None, "needs one class a row"),
        ("split", PLAIN, 12, 0.1, None, "write 10 to 11"),
        ("quantity", PLAIN, 1, 0.1, None, "2 clients"),
        ("quantity", PLAIN, 10, 0.1, None, "10 examples for each small one"),
        ("natural", PLAIN, 2, 0.1, None, "needs a column of owners, got None; made up has none"),
        ("writer", TWO, 2, 0.1, "city", "needs writer, got 'city'"),
        ("natural", TWO, 2, 0.1, None, "got None; made up has writer, city"),
    ],
)
def test_mistakes_say_what_to_write(
    name: str,
    data: Dataset,
    num_clients: int | None,
    alpha: float,
    column: str | None,
    words: str,
) -> None:
    with pytest.raises(DeltaflError, match=words):
        make_partition(name, data, num_clients, alpha, stream(0, "partition"), column)


def slow_yurochkin2019(
    label_e: IntArray, num_clients: int, alpha: float, rng: np.random.Generator
) -> list[IntArray]:
    """As it was written first: the largest client is looked for anew for each empty one."""
    parts: list[list[IntArray]] = [[] for _ in range(num_clients)]
    pools = [rng.permutation(np.flatnonzero(label_e == label)) for label in np.unique(label_e)]
    for pool in pools:
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
        size_m[client] = 1
        size_m[giver] -= 1
    return clients


@given(st.integers(1, 60), st.integers(0, 60), st.floats(-3, 2), st.integers(0, 100))
def test_many_empty_clients_are_filled_with_the_same_bits(
    num_clients: int, more: int, log_alpha: float, seed: int
) -> None:
    label_e = balanced(num_clients + more, 4)
    found, slow = (
        deal(label_e, num_clients, 10.0**log_alpha, stream(seed, "partition"))
        for deal in (yurochkin2019, slow_yurochkin2019)
    )
    assert all(map(np.array_equal, found, slow))


class Counted(np.ndarray[Any, np.dtype[np.int64]]):
    """Rows that know how often all of them were listed."""

    lists = 0

    def tolist(self) -> Any:
        type(self).lists += 1
        return super().tolist()


def test_who_gives_to_many_has_its_rows_listed_once() -> None:
    Counted.lists = 0
    clients = [np.arange(1000).view(Counted), *[np.zeros(0, np.int64)] * 200]
    filled = with_least(clients, 1, stream(0, "partition"))
    assert [len(rows) for rows in filled] == [800, *[1] * 200]
    assert Counted.lists == 1


@given(
    name=st.sampled_from(["iid", "hsu2019", "dirichlet", "quantity"]),
    size=st.integers(1, 12),
    num_clients=st.integers(2, 20),
    seed=st.integers(0, 100),
)
def test_no_client_is_smaller_than_min_size(
    name: str, size: int, num_clients: int, seed: int
) -> None:
    dataset = make_dataset(balanced(260, 5), 5)
    rng = stream(seed, "partition")
    clients = make_partition(f"{name}(min_size={size})", dataset, num_clients, 0.1, rng)
    assert min(map(len, clients)) >= size
    rows = np.concatenate(clients)
    assert len(np.unique(rows)) == len(rows)
    assert all((np.diff(client) > 0).all() for client in clients)
    plain = make_partition(name, dataset, num_clients, 0.1, stream(seed, "partition"))
    assert sum(map(len, clients)) == sum(map(len, plain))
    for before, after in zip(plain, clients, strict=True):
        # Who is large enough gives, who is not gets, and nobody else's rows move.
        assert set(before) <= set(after) if len(before) < size else set(after) <= set(before)


@given(
    num_classes=st.integers(2, 10),
    k=st.integers(1, 10),
    num_clients=st.integers(1, 30),
    seed=st.integers(0, 100),
)
def test_every_client_has_k_classes(num_classes: int, k: int, num_clients: int, seed: int) -> None:
    label_e = np.random.default_rng(seed).permutation(balanced(40 * num_classes, num_classes))
    dataset = make_dataset(label_e, num_classes)
    rng = stream(seed, "partition")
    if not k <= num_classes <= k * num_clients:
        with pytest.raises(DeltaflError, match=rf"got k = {k} and {num_clients} clients"):
            make_partition(f"k-classes(k={k})", dataset, num_clients, 1.0, rng)
        return
    clients = make_partition(f"k-classes(k={k})", dataset, num_clients, 1.0, rng)
    assert {len(np.unique(label_e[rows])) for rows in clients} == {k}
    assert len(np.unique(np.concatenate(clients))) == len(label_e)
    held_c = [sum(label in label_e[rows] for rows in clients) for label in range(num_classes)]
    assert np.ptp(held_c) <= 1
    for label in range(num_classes):
        taken = [np.count_nonzero(label_e[rows] == label) for rows in clients]
        assert np.ptp([count for count in taken if count]) <= 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dirichlet(min_size=0)", "min_size of 'dirichlet' is 0; it must be a whole number"),
        ("dirichlet(min_size=2.5)", "min_size of 'dirichlet' is 2.5"),
        ("dirichlet(min_size=many)", "min_size of 'dirichlet' is 'many'"),
        ("dirichlet(min_sise=2)", "did you mean 'min_size'"),
        ("dirichlet(min_size=6)", "min_size is 6; 4 clients share 20 examples: write 5 or less"),
        ("shards(min_size=2)", "'shards' has no options; leave out 'min_size'"),
        ("k-classes(k=11)", "10 classes need a k from 3 to 10"),
        ("k-classes(k=2)", "10 classes need a k from 3 to 10"),
        ("k-classes(k=10)", "of them would share the 2 examples of one class: write fewer"),
        ("dirichlet(", "cannot read 'dirichlet"),
        (7, "partition is of type int; it must be a name"),
        (object(), "partition is of type object; it must be a name"),
        (np.arange(6), "partition is of type ndarray; it must be a name"),
    ],
)
def test_mistakes_in_options(text: object, words: str) -> None:
    with pytest.raises(DeltaflError, match=re.escape(words)):
        make_partition(text, PLAIN, 4, 0.5, stream(0, "partition"))


class Halves:
    """A partitioner as those of ``flwr_datasets`` are: it takes one data set, once."""

    num_partitions = 2

    def __init__(self, first: float = 0.5, column: str = "label") -> None:
        self.first = first
        self.column = column
        self.held: Any = None

    @property
    def dataset(self) -> Any:
        return self.held

    @dataset.setter
    def dataset(self, value: Any) -> None:
        if self.held is not None:
            raise ValueError("assigned only once")
        assert value.num_rows == len(value[self.column])
        self.held = value

    def load_partition(self, partition_id: int) -> Any:
        order = np.argsort(self.held[self.column], kind="stable")
        cut = round(self.first * len(order))
        return self.held.select([order[:cut], order[cut:]][partition_id])


def test_a_partitioner_of_flower_deals_the_rows() -> None:
    pytest.importorskip("datasets")
    halves = Halves()
    for _ in range(2):  # each seed makes a task of its own
        clients = make_partition(halves, PLAIN, None, 0.5, stream(0, "partition"))
        assert [set(LABEL_E[rows]) for rows in clients] == [set(range(5)), set(range(5, 10))]
        assert all((np.diff(rows) > 0).all() for rows in clients)
    assert halves.held is None
    for given_object, num_clients, words in (
        (halves, 3, "deals to 2 clients, and clients is 3: leave it out"),
        (Halves(1.0), None, "gives client 1 no example"),
        (Halves(column="kind"), None, "failed on the columns label, row of deltafl: "),
    ):
        with pytest.raises(DeltaflError, match=words):
            make_partition(given_object, PLAIN, num_clients, 0.5, stream(0, "partition"))
    with pytest.raises(DeltaflError, match="is the class Halves; give one of its objects"):
        make_partition(Halves, PLAIN, None, 0.5, stream(0, "partition"))
    # Else the column would be a feature.
    with pytest.raises(DeltaflError, match="'Halves' deals the rows, and column 'city' says who"):
        make_partition(halves, ONE, None, 0.5, stream(0, "partition"), "city")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[0, 1], [1, 2]], "deals row 1 2 times; let one client have it"),
        ([[0, 0], [1]], "deals row 0 2 times"),
        ([[0, 1], [-1]], r"gives client 1 \[-1\]; it must be row numbers from 0 to 19"),
        ([[0, 1], [20]], r"gives client 1 \[20\]"),
        ([[0, True], [2]], r"gives client 0 \[0, True\]"),
    ],
)
def test_what_a_partitioner_must_deal(rows: Any, words: str) -> None:
    pytest.importorskip("datasets")

    class Own:
        dataset = None
        num_partitions = len(rows)

        def load_partition(self, k: int) -> Any:
            return {"row of deltafl": rows[k]}

    with pytest.raises(DeltaflError, match=f"the partitioner Own {words}"):
        make_partition(Own(), PLAIN, None, 0.5, stream(0, "partition"))


def test_the_partitioners_of_flower() -> None:
    flower = pytest.importorskip("flwr_datasets.partitioner")
    data = make_dataset(balanced(400), 10, writer=np.arange(400) // 40)
    for partitioner, num_clients in (
        (flower.IidPartitioner(num_partitions=8), 8),
        (flower.DirichletPartitioner(8, "label", 0.5, min_partition_size=5, seed=1), 8),
        (flower.PathologicalPartitioner(8, "label", 3, "first-deterministic"), 8),
        (flower.NaturalIdPartitioner(partition_by="writer"), 10),
        (flower.LinearPartitioner(num_partitions=4), 4),
    ):
        clients = make_partition(partitioner, data, None, 0.5, stream(0, "partition"))
        rows = np.concatenate(clients)
        assert (len(clients), len(np.unique(rows)), len(rows)) == (num_clients, 400, 400)


def turned(y: Any, num_clients: int, rng: np.random.Generator, by: int = 0) -> Any:
    """A function of the user's."""
    return np.array_split(np.roll(rng.permutation(len(y)), by), num_clients)


@pytest.mark.parametrize("kind", [list, dict, set])
def test_a_function_deals_the_rows(kind: type) -> None:
    def deal(y: Any, num_clients: int, rng: np.random.Generator) -> Any:
        y.sort()  # a copy
        parts = turned(y, num_clients, rng)
        if kind is list:
            return parts
        return {client: kind(rows) if kind is set else rows for client, rows in enumerate(parts)}

    clients = make_partition(deal, PLAIN, 4, 0.5, stream(0, "partition"))
    again = make_partition(deal, PLAIN, 4, 0.5, stream(0, "partition"))
    other = make_partition(deal, PLAIN, 4, 0.5, stream(1, "partition"))
    same = [np.array_equal(one, two) for one, two in zip(clients, again, strict=True)]
    assert same == [True] * 4
    assert any(not np.array_equal(one, two) for one, two in zip(clients, other, strict=True))
    assert np.array_equal(np.sort(np.concatenate(clients)), np.arange(len(LABEL_E)))
    assert all((np.diff(rows) > 0).all() and rows.dtype == np.int64 for rows in clients)
    assert len(set(LABEL_E.tolist())) == 10


def test_what_a_function_draws_from_numpy_follows_the_seed() -> None:
    def deal(y: Any, num_clients: int, rng: object) -> Any:
        return np.array_split(np.random.permutation(len(y)), num_clients)  # noqa: NPY002

    one, two = (make_partition(deal, PLAIN, 2, 0.5, stream(5, "partition")) for _ in range(2))
    assert np.array_equal(one[0], two[0])


@pytest.mark.parametrize(
    ("deal", "words"),
    [
        (lambda y, m, rng: [[0]] * (m - 1), "deals to 3 clients, and clients is 4"),
        (lambda y, m, rng: [[k, 7] for k in range(m)], "deals row 7 4 times"),
        (lambda y, m, rng: [[k] for k in range(m - 1)] + [[]], r"gives client 3 \[\]"),
        (
            lambda y, m, rng: [[k / 2] for k in range(m)],
            r"client 0 \[0.0\]; it must be row numbers",
        ),
        (lambda y, m, rng: [[k] for k in range(-1, 3)], r"client 0 \[-1\]"),
        (lambda y, m, rng: [[k + 17] for k in range(m)], r"client 3 \[20\].* from 0 to 19"),
        (lambda y, m, rng: [[True]] * m, r"client 0 \[True\]"),
        (lambda y, m, rng: [[2 + k, False] for k in range(m)], r"client 0 \[2, False\]"),
        (lambda y, m, rng: [["a"]] * m, "client 0 .*'a'"),
        (lambda y, m, rng: {k + 1: [k] for k in range(m)}, "failed: KeyError: 0"),
        (lambda y, m, rng: None, "failed: TypeError"),
        (lambda y, m: [[0]], "failed: TypeError: .* 2 positional arguments"),
    ],
)
def test_what_a_function_must_return(deal: Any, words: str) -> None:
    with pytest.raises(DeltaflError, match=f"the partition <lambda> .*{words}"):
        make_partition(deal, PLAIN, 4, 0.5, stream(0, "partition"))


def test_a_function_of_a_file_has_options_and_is_the_same_code_on_resume(tmp_path: Path) -> None:
    file = tmp_path / "dealing.py"
    file.write_text(
        "import numpy as np\n"
        "def deal(y, m, rng, by=0):\n"
        "    return np.array_split(np.roll(rng.permutation(len(y)), by), m)\n"
    )
    for text, same in ((f"{file}:deal", turned), (f"{file}:deal(by=3)", partial(turned, by=3))):
        got, want = (
            make_partition(deal, PLAIN, 5, 0.5, stream(2, "partition")) for deal in (text, same)
        )
        assert [rows.tolist() for rows in got] == [rows.tolist() for rows in want]
    for text, words in (
        (f"{file}:nix", r"write there: def nix\(y, num_clients, rng\)"),
        (f"{file}:deal(to=3)", "unexpected keyword argument 'to'"),
        (f"{file}", "choose one of FILE.py:FUNCTION, dirichlet"),
        (str(tmp_path / "none.py:deal"), "there is no file .*write --partition FILE.py:FUNCTION"),
    ):
        with pytest.raises(DeltaflError, match=words):
            make_partition(text, PLAIN, 5, 0.5, stream(0, "partition"))
    given = {"task": "digits", "samplers": "uniform", "seeds": 1, "rounds": 1, "clients": 20}
    given["partition"] = f"{file}:deal"
    settings = make_settings(CompareSettings, given)
    run_comparison(settings, tmp_path / "out", lambda _: None, report=False)
    file.write_text(file.read_text().replace("by=0", "by=10"))
    forget_edited()
    with pytest.raises(DeltaflError, match=r"deal is not the one that .* was played with"):
        run_comparison(make_settings(CompareSettings, given), tmp_path / "out", lambda _: None)
