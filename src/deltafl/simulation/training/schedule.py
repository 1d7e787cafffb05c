"""The minibatches of a cohort, padded to one width."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...types import IntArray
from .serial import LocalJob, LocalWork, passes


class Schedule(NamedTuple):
    """The minibatches of a cohort, clients with many steps first: the active ones are a prefix."""

    jobs: list[LocalJob]
    order: list[int]  # their places in the given order
    steps_n: IntArray
    #: of the task's examples, int64 (K, n, B), padded with a client's first row
    rows_knb: Tensor
    #: in a step's mean, float32: 1 / size of the minibatch, 0 for padding
    weight_knb: Tensor


def schedule_of(jobs: Sequence[LocalJob], work: LocalWork, width: int) -> Schedule:
    """Draw the minibatches of at least one client, and pad each to ``width`` examples."""
    steps = [work.num_steps(len(job.rows)) for job in jobs]
    order = sorted(range(len(jobs)), key=lambda i: -steps[i])
    jobs = [jobs[i] for i in order]
    steps_n = np.array([steps[i] for i in order])
    shape = (len(jobs), int(steps_n[0]), width)
    rows_nkb = np.empty(shape, np.int64)
    weight_nkb = np.zeros(shape, np.float32)
    for job, rows_kb, weight_kb, num_steps in zip(
        jobs,
        rows_nkb,
        weight_nkb,
        steps_n.tolist(),
        strict=True,
    ):
        num_examples = len(job.rows)
        orders, size = passes(num_examples, work, job.rng)
        batches = work.batches_a_pass(num_examples)
        # Places of examples among the client's; 0 for padding.
        place_pe = np.zeros((len(orders), batches * size), np.int64)
        place_pe[:, :num_examples] = orders
        # Padding has the weight 0, and has to be some example.
        rows_kb[:] = job.rows[0]
        rows_kb[:num_steps, :size] = job.rows[place_pe.reshape(-1, size)[:num_steps]]
        # Of the pass, before each step: its last minibatch may be smaller.
        left_k = num_examples - size * (np.arange(num_steps) % batches)
        size_k1 = np.minimum(size, left_k)[:, None]
        weight_kb[:num_steps] = np.where(np.arange(width) < size_k1, 1 / size_k1, 0)
    rows_knb = torch.from_numpy(rows_nkb.swapaxes(0, 1).copy())
    weight_knb = torch.from_numpy(weight_nkb.swapaxes(0, 1).copy())
    return Schedule(jobs, order, steps_n, rows_knb, weight_knb)
