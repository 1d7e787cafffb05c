"""Means of what clients measure: numbers, lists, weights of the server and of the clients."""

from math import inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deltafl.federation.replies import mean_metrics

from .tools import federation


def test_numbers_and_lists_are_weighted_means() -> None:
    replies = [
        (1.0, {"auc": 0.5, "recall": [0.0, 1.0], "num-examples": 10**9}),
        (3.0, {"auc": 0.9, "recall": [0.4, 0.2]}),
    ]
    assert mean_metrics(replies) == {
        "auc": pytest.approx(0.8),
        "recall": pytest.approx([0.3, 0.4]),
    }


def test_an_entry_counts_where_it_is_a_number() -> None:
    """A client without a class has no recall of it, say."""
    replies: Any = [
        (1.0, {"recall": [0.5, nan], "a": inf, "b": "0.5", "c": 4}),
        (1.0, {"recall": [0.7, 0.25], "a": 2.0, "c": 10**400, "none": nan}),
        (2.0, {"recall": [0.6, nan], "b": None, "c": [], "nobody": [nan, 1.0]}),
    ]
    means = mean_metrics(replies)
    assert means["recall"] == pytest.approx([0.6, 0.25])
    assert (means["a"], means["c"]) == (2.0, 4.0)
    assert means["nobody"] == pytest.approx([nan, 1.0], nan_ok=True)
    assert means.keys() == {"recall", "a", "c", "nobody"}


def test_the_usual_length_counts_and_others_are_named() -> None:
    said: list[str] = []
    replies: Any = [(1.0, {"counts": [1, 2]}), (1.0, {"counts": [3, 4]}), (9.0, {"counts": [5]})]
    assert mean_metrics(replies, warn=said.append) == {"counts": [2.0, 3.0]}
    assert len(said) == 1
    assert "the weight 0: 'counts' 1 of 3" in said[0]


def test_what_some_or_all_replies_lack_is_named_once() -> None:
    said: list[str] = []
    replies: Any = [
        (1.0, {"auc": 0.5, "f1": nan, "name": "a", "loss": 1.0, "few": [1.0, nan]}),
        (1.0, {"f1": nan, "name": "b", "loss": 3.0, "few": [3.0, nan]}),
    ]
    means = mean_metrics(replies, warn=said.append)
    assert means == {"auc": 0.5, "loss": 2.0, "few": pytest.approx([2.0, nan], nan_ok=True)}
    assert len(said) == 1
    assert said[0].endswith("'auc' 1 of 2, 'f1' 2 of 2, 'name' 2 of 2")
    said.clear()
    nobody: Any = [(1.0, {"loss": 1.0, "positives": 0}), (1.0, {"loss": 3.0, "positives": 0})]
    assert mean_metrics(nobody, "positives", said.append) == {}
    assert said[0].endswith("the weight 0: 'loss' 2 of 2")
    many: Any = [(1.0, {f"{i:03}{'x' * 99}": 1.0 for i in range(200)}), (1.0, {})]
    mean_metrics(many, warn=said.append)
    assert said[-1].endswith(" and 197 more")
    assert len(said[-1]) < 400


def test_arrays_and_nested_lists_are_means_entry_by_entry() -> None:
    """Of hosts whose messages may hold them: confusion counts, say."""
    replies: Any = [
        (1.0, {"counts": [[4, 0], [1, 3]], "recall": np.array([1.0, 0.5]), "n": np.int64(1)}),
        (
            3.0,
            {
                "counts": ((0, 4), (1, 3)),
                "recall": np.array([0.0, 0.5], np.float32),
                "n": np.int64(5),
            },
        ),
        (9.0, {"counts": [[1], [2, 3]], "recall": {"a": 1.0}, "n": "3"}),
    ]
    assert mean_metrics(replies) == {"counts": [[1, 3], [1, 3]], "recall": [0.25, 0.5], "n": 4.0}


def test_a_metric_of_the_clients_may_be_their_weight() -> None:
    said: list[str] = []
    replies: Any = [
        (0.9, {"loss": 1.0, "positives": 1, "num-examples": 100}),
        (0.1, {"loss": 5.0, "positives": 3, "num-examples": 200}),
        (0.5, {"loss": 1e9, "positives": -1}),
        (0.5, {"loss": 1e9}),
    ]
    means = mean_metrics(replies, "positives", said.append)
    assert means == {"loss": pytest.approx(4.0), "num-examples": pytest.approx(175.0)}
    assert said == [
        "2 of 4 replies have no number >= 0 as their 'positives', and do not count in the means of "
        "metrics"
    ]
    claimed = mean_metrics(replies, "num-examples")
    assert claimed == {"loss": pytest.approx(11 / 3), "positives": pytest.approx(7 / 3)}


def test_claims_whose_sum_overflows_are_weights_all_the_same() -> None:
    replies: Any = [(1.0, {"auc": auc, "claim": 1.5e308}) for auc in (0.25, 0.5, 0.75)]
    assert mean_metrics([*replies, (1.0, {"auc": 9.0, "claim": 1.0})], "claim") == {"auc": 0.5}


@given(
    st.lists(
        st.tuples(
            st.floats(0.01, 10),
            st.dictionaries(
                st.sampled_from("abc"),
                st.floats() | st.integers() | st.text() | st.none() | st.lists(st.floats()),
            ),
        )
    )
)
@example([(10.0, {"a": 1e308}), (10.0, {"a": [1e308, nan]}), (10.0, {"a": -1e308})])
def test_whatever_clients_send_is_read(replies: Any) -> None:
    for name, mean in mean_metrics(replies).items():
        assert name in "abc"
        assert isinstance(mean, float | list)


def test_n_is_a_share_of_the_known_clients() -> None:
    fed = federation("uniform", m=9, n=None, fraction_train=0.5)
    assert (fed.rules.min_clients, fed.plan.n, len(fed.open(fed.keys).client_n)) == (2, 4, 4)
    assert federation("uniform", m=9, n=None, fraction_train=0.01).plan.n == 1
    assert federation("uniform", m=9, n=None).plan.n == 9
