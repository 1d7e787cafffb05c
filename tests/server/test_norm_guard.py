"""The norm guard: nothing below its bound, the bound above it, and the same after a resume."""

from pathlib import Path

import numpy as np
import pytest

from conftest import Recorder
from deltafl import (
    DeltaflError,
    Fixed,
    Plan,
    Population,
    RoundState,
    close_round,
    init_round,
    open_round,
)
from deltafl.scale.named_arrays import named_arrays
from deltafl.server.norm_guard import GuardState
from deltafl.server.table import make_parts
from deltafl.simulation.folder.directory import RunDirectory
from deltafl.simulation.settings import RunSettings
from deltafl.types import RoundInfo

POPULATION = Population.from_sizes([1, 1, 1])


def played(norm_guard: float | None, lengths: list[float]) -> tuple[RoundState, list[RoundInfo]]:
    """Rounds in which everybody's update has the given length."""
    plan = Plan(
        POPULATION,
        Fixed(),
        3,
        parts=make_parts({"server_optimizer": Recorder(), "norm_guard": norm_guard}),
    )
    state = init_round(plan, np.zeros(2))
    infos = []
    for length in lengths:
        cohort = open_round(plan, state)
        state, info = close_round(plan, state, cohort, [np.array([0.6 * length, 0.8 * length])] * 3)
        infos.append(info)
    return state, infos


def test_it_does_nothing_while_norms_are_below() -> None:
    lengths = np.random.default_rng(0).uniform(1, 2.9, size=30).tolist()
    (off, without) = played(None, lengths)
    (on, guarded) = played(3.0, lengths)
    assert "norm_guard" not in off.parts
    assert np.array_equal(
        off.parts["server_optimizer"].delta_d, on.parts["server_optimizer"].delta_d
    )
    assert repr(without) == repr(guarded)
    for factor in (1.0, 0.5, -3.0, float("nan"), float("inf")):
        with pytest.raises(DeltaflError, match=r"norm_guard is .*; it must be in"):
            played(factor, [])


def test_an_outlier_is_shortened_to_the_factor_times_the_median() -> None:
    state, infos = played(3.0, [1, 2, 3, 4, 5, 1000, 2])
    assert [info.clip_factor for info in infos] == pytest.approx([1, 1, 1, 1, 1, 0.009, 1])
    assert infos[5].estimate_norm == pytest.approx(9)
    assert isinstance(state.parts["norm_guard"], GuardState)
    np.testing.assert_allclose(
        state.parts["norm_guard"].norm_k[-7:], [1, 2, 3, 4, 5, 9, 2], rtol=1e-6
    )


def test_the_first_five_steps_and_steps_of_nothing_are_no_measure() -> None:
    _, infos = played(3.0, [1, 1, 1, 1, 1000, 0, 0, 0, 5])
    assert [info.clip_factor for info in infos[:8]] == [1] * 8
    assert infos[8].clip_factor == pytest.approx(3 / 5)


def test_a_lasting_change_of_scale_is_followed() -> None:
    _, infos = played(3.0, [1.0] * 20 + [100.0] * 60)
    norms = [info.estimate_norm for info in infos]
    assert norms[20] == pytest.approx(3)
    assert norms[-1] == pytest.approx(100)
    assert np.all(np.diff(norms) > -1e-9)


def test_its_norms_survive_a_checkpoint(tmp_path: Path) -> None:
    plan = Plan(POPULATION, Fixed(), 3, parts=make_parts({"norm_guard": 3.0}))
    state = init_round(plan, np.zeros(2))
    for length in [1, 2, 3, 4, 5, 6]:
        state, _ = close_round(plan, state, open_round(plan, state), [np.array([length, 0.1])] * 3)
    directory = RunDirectory(tmp_path / "run")
    directory.start(RunSettings())
    directory.save(state)
    back = directory.load(plan.sampler, init_round(plan, np.zeros(2)))
    assert [(n, a.tobytes()) for n, a in named_arrays(back)] == [
        (n, a.tobytes()) for n, a in named_arrays(state)
    ]
    results = [
        close_round(plan, s, open_round(plan, s), [np.array([900.0, 1.0])] * 3)[1]
        for s in (state, back)
    ]
    assert repr(results[0]) == repr(results[1])
    assert results[0].clip_factor < 0.1
