"""What a model's outputs on the test examples are worth, by every metric of a task."""

import math
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ..errors import DeltaflError
from ..tasks.base import Task
from ..tasks.metrics import Metric
from ..tasks.partitions import rows_by_key
from ..types import Array, FloatArray, IntArray

_NOTHING: Mapping[str, float] = MappingProxyType({})


class Evaluation(NamedTuple):
    """The global model on the pooled test set; values are NaN where unknown.

    ``client_accuracy`` is the plain mean over the clients that own test examples, whatever their
    weights; ``others`` are the other metrics of the task by name.
    """

    loss: float
    accuracy: float
    client_accuracy: float = math.nan
    others: Mapping[str, float] = _NOTHING

    def line(self) -> dict[str, float]:
        """As in a line of ``rounds.jsonl``."""
        line = self._asdict()
        others: Mapping[str, float] = line.pop("others")
        return {**line, **others}


class Judged(NamedTuple):
    """A model that has seen the test examples: its mean loss, which of them (or which share of
    each) it has right where they have classes, and its outputs where a metric looks at them.
    """

    task: Task
    loss: float
    hit_e: FloatArray | None = None
    output_e: Array | None = None

    def evaluation(self) -> Evaluation:
        """All metrics on the pooled test set."""
        others = {}
        if self.output_e is not None:
            others = {
                metric.name: metric(self.output_e, self.task.dataset.test_y, self.task.ignored)
                for metric in self.task.metrics
                if metric.name not in ("accuracy", "loss")
            }
        hit_e = self.hit_e
        if hit_e is None:
            return Evaluation(self.loss, math.nan, others=others)
        mean = math.nan
        if self.task.test_clients is not None:
            accuracy_m = self._owners_shares(hit_e, self.task.test_clients)
            known_m = ~np.isnan(accuracy_m)
            if known_m.any():
                mean = float(accuracy_m[known_m].mean())
        with np.errstate(invalid="ignore"):  # where all labels are ignored
            accuracy = hit_e.sum() / self.task.counted_e.sum()
        return Evaluation(self.loss, float(accuracy), mean, others)

    def by_client(self) -> FloatArray | None:
        """The metric on each client's own test examples, float64 (m,), NaN where it has no value.

        None for the loss, and where test examples have no owners. There the accuracy of a class is

            accuracy_i = sum_c share_ic accuracy_c / sum_c share_ic,  sums over the tested classes,

        with share_ic the share of class c in the client's training data and accuracy_c the share
        that is right of the test examples of class c: the expectation if the test set were split as
        the training data are, without the noise of small splits. NaN for a client with none of its
        classes.
        """
        task = self.task
        metric = task.metrics[0]
        owner_e = task.test_clients
        if metric.name not in ("accuracy", "loss"):
            if self.output_e is None or owner_e is None:
                return None
            return self._by_owner(metric, self.output_e, owner_e)
        if self.hit_e is None or metric.name == "loss":
            return None
        if owner_e is not None:
            return self._owners_shares(self.hit_e, owner_e)
        y_e = task.dataset.test_y
        if task.dataset.num_classes < 1 or y_e.ndim > 1:
            return None
        tested_e = task.counted_e > 0
        accuracy_c = _shares(
            self.hit_e[tested_e],
            task.counted_e[tested_e],
            y_e[tested_e].astype(np.int64),
            task.dataset.num_classes,
        )
        share_mc = task.shares
        is_tested_c = ~np.isnan(accuracy_c)
        # Classes without a test example leave both sums, as if nobody had them: with 0 they would
        # count as wrong.
        with np.errstate(invalid="ignore"):  # 0 / 0 of clients without tested classes
            right_m = np.einsum("mc,c->m", share_mc, np.nan_to_num(accuracy_c))
            return np.asarray(right_m / np.einsum("mc,c->m", share_mc, is_tested_c))

    def _owners_shares(self, hit_e: FloatArray, owner_e: IntArray) -> FloatArray:
        """The share that is right of each client's test examples."""
        # -1 is nobody's: such an example counts in the pooled test set alone.
        owned_e = owner_e >= 0
        return _shares(
            hit_e[owned_e],
            self.task.counted_e[owned_e],
            owner_e[owned_e],
            self.task.num_clients,
        )

    def _by_owner(
        self,
        metric: Metric,
        output_e: Array,
        owner_e: IntArray,
    ) -> FloatArray:
        value_m = np.full(self.task.num_clients, np.nan)
        for row_n in rows_by_key(owner_e):
            client = owner_e[row_n[0]]
            # A function of the user's may fail on a few examples, such as those of one class.
            with suppress(DeltaflError):
                if client >= 0:
                    value_m[client] = metric(
                        output_e[row_n],
                        self.task.dataset.test_y[row_n],
                        self.task.ignored,
                    )
        return value_m


def _shares(
    hit_e: FloatArray,
    counted_e: FloatArray,
    group_e: IntArray,
    number: int,
) -> FloatArray:
    """The share of what counts in each group that is right; NaN for a group without any."""
    with np.errstate(invalid="ignore"):
        right_g = np.bincount(group_e, weights=hit_e, minlength=number)
        share_g: FloatArray = right_g / np.bincount(group_e, weights=counted_e, minlength=number)
    return share_g
