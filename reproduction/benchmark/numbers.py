"""One number of one run. A run that diverged never reaches anything, whatever it did before."""

import math
from collections.abc import Callable

import numpy as np

from deltafl.analysis.statistics import mean_of_best
from deltafl.simulation.record import RunRecord

from ..pages.measures import reach

MB = 1e6


def rounds_to_threshold(record: RunRecord, threshold: float, smoothed: bool = False) -> float | None:
    """The first evaluated round that reaches the threshold, by itself or by the mean of five; None for never."""
    at = _at(record, threshold, smoothed)
    return None if at is None else float(record.round[at])


def bounded_rounds(record: RunRecord, threshold: float, smoothed: bool = False) -> float:
    """min(R, T): the rounds to the threshold, or all rounds of the run if it never reached it.

    Its mean is the restricted mean of survival analysis: defined for every run, a lower bound of the mean of R.
    """
    rounds = rounds_to_threshold(record, threshold, smoothed)
    return float(record.settings["rounds"]) if rounds is None else rounds


def bytes_to_threshold(record: RunRecord, threshold: float) -> float | None:
    """Bytes down and up until the threshold was reached; None for never."""
    at = _at(record, threshold, False)
    return None if at is None else record.bytes[at]


def bounded_bytes(record: RunRecord, threshold: float) -> float:
    """Bytes down and up in ``bounded_rounds``: those of all rounds of the run if it never reached the threshold.

    Of a run that diverged, those of its rounds, and as many again for each round that was not played.
    """
    return _bounded(record, bytes_to_threshold(record, threshold), bytes_a_round)


def bounded_seconds(record: RunRecord, threshold: float) -> float:
    """Processor time in ``bounded_rounds``, as ``bounded_bytes``."""
    at = _at(record, threshold, False)
    return _bounded(record, None if at is None else record.cpu_seconds[at], seconds_a_round)


def mean_accuracy(record: RunRecord, horizon: int) -> float:
    """Mean test accuracy over rounds 1 to ``horizon``: the area under the curve. 0 if it was never measured.

    Between evaluations, and after a divergence, the last accuracy counts; before the first, the first.
    """
    known = [0.0 if value is None or not math.isfinite(value) else value for value in record.accuracy]
    last = np.searchsorted(record.round, np.arange(1, horizon + 1), side="right") - 1
    return float(np.mean(np.array(known)[np.maximum(last, 0)]))


def last_accuracy(record: RunRecord) -> float:
    """Mean of the five best of the last evaluations (``acc_top5``); of a run that diverged, the last one."""
    run = record.run()
    value = run.accuracy_r[-1] if run.diverged is not None else mean_of_best(run.accuracy_r, run.round_r, True)
    return float(np.nan_to_num(value))


def bytes_a_round(record: RunRecord) -> float:
    """Bytes down and up in a round, on average."""
    return float(record.bytes[-1] or 0.0) / max(record.round[-1], 1)


def seconds_a_round(record: RunRecord) -> float:
    """Processor time of training, drawing and estimating in a round, on average; evaluation and probes excluded."""
    return float(record.cpu_seconds[-1] or 0.0) / max(record.round[-1], 1)


def _bounded(record: RunRecord, reached: float | None, a_round: Callable[[RunRecord], float]) -> float:
    """What it took, or what all rounds of the run would."""
    return a_round(record) * float(record.settings["rounds"]) if reached is None else reached


def _at(record: RunRecord, threshold: float, smoothed: bool) -> int | None:
    return None if record.diverged is not None else reach(record, threshold, smoothed)
