"""Theoretical samplers without a table of all updates: the same bits, and a block of models in
RAM.
"""

import errno
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl.errors import DeltaflError
from deltafl.plan import make_plan
from deltafl.round import init_round
from deltafl.simulation import oracle
from deltafl.simulation.engine import Engine, Training
from deltafl.simulation.oracle import SimulatedOracle, mapped_table
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.setup import engine_of
from deltafl.simulation.training.serial import LocalWork
from deltafl.types import Cohort, IntArray, Params, Reports
from tools.simulation import TINY, run


@pytest.mark.parametrize("given", [{"sampler": "delta"}, {"sampler": "fedis", "mime": 0.5}])
def test_a_run_without_the_table_has_the_same_bits(
    given: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table"
    file = tmp_path / "file"
    run(table, **TINY | given)
    monkeypatch.setattr(oracle, "TABLE_BYTES", 0)
    run(file, **TINY | given)
    assert (table / "rounds.jsonl").read_bytes() == (file / "rounds.jsonl").read_bytes()
    assert {path.name for path in table.iterdir()} == {path.name for path in file.iterdir()}


class Poisoned(Engine):
    """An engine whose client 3 diverges, and which counts who is trained."""

    trained: tuple[int, ...] = ()

    def train(self, params_d: Params, round: int, client_n: IntArray, *more: Any) -> Training:
        self.trained = (*self.trained, len(client_n))
        training = super().train(params_d, round, client_n, *more)
        training.update_nd[client_n == 3] = np.nan
        return training


def test_table_and_file_reject_a_client_that_diverges_and_train_nobody_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = engine_of(make_settings(RunSettings, TINY)).task
    engine = Poisoned(task, LocalWork(lr=0.1, epochs=1), 0)
    plan = make_plan("oort", task.population("data"), 5)
    state = init_round(plan, engine.initial_params())
    in_ram = SimulatedOracle(engine, plan, state)
    in_file = SimulatedOracle(engine, plan, state)
    with monkeypatch.context() as patch:
        patch.setattr(oracle, "TABLE_BYTES", 0)
        reports = in_file.reports()
    np.testing.assert_equal(in_ram.reports(), reports)
    assert not reports.responded_n[3]
    assert (reports.square_loss_n[reports.responded_n] > 0).all()
    drawn = np.array([7, 3, 1, 7])
    np.testing.assert_equal(in_ram.train(drawn), in_file.train(drawn))
    assert engine.trained == (5, 5, 2, 12)
    cohort = Cohort(drawn, np.ones(4, np.int64), np.ones(4))
    assert in_ram.traffic(cohort, 4) == in_file.traffic(cohort, 4)


def test_ram_holds_a_block_of_updates_and_never_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = 400
    d = 5_000
    block = 5
    rng = np.random.default_rng(0)

    class Fake:
        """Trains at random; only what an oracle uses of an engine."""

        num_params = d

        def train(self, params_d: Params, round: int, client_k: IntArray, *_: object) -> Training:
            k = len(client_k)
            update_kd = rng.standard_normal((k, d), dtype=np.float32)
            return Training(update_kd, Reports.make(k, loss=np.ones(k), square_loss=np.ones(k)))

    monkeypatch.setattr(oracle, "TABLE_BYTES", 0)
    plan = make_plan("uniform", [1] * m, block)
    state = init_round(plan, np.zeros(d, dtype=np.float32))
    tracemalloc.start()
    in_file = SimulatedOracle(Fake(), plan, state, tmp_path)  # type: ignore[arg-type]
    reports = in_file.reports()
    in_file.train(np.arange(block))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    row = 4 * d
    # 16 blocks: what checks and sums take beside the updates.
    assert block * row < peak < m * row / 5
    update_md = in_file.train(np.arange(m)).update_nd.astype(np.float64)
    deviation_m = ((update_md - update_md.mean(axis=0)) ** 2).sum(axis=1)
    np.testing.assert_allclose(reports.squared_deviation_n, deviation_m, rtol=1e-12)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DeltaflError, match="No space left"):
        mapped_table(10, 100, tmp_path)
