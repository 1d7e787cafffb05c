"""Every rule against a slow scalar twin written from Reddi et al. 2021, algorithm 2, and first
steps by hand.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from math import sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafl import (
    Adaptive,
    DeltaflError,
    Momentum,
    ServerOptimizer,
    Sgd,
    make_plan,
    make_server_optimizer,
)
from deltafl.server.optimizers import SERVER_OPTIMIZERS, FedExP
from deltafl.server.part import Step
from deltafl.server.table import SETTINGS

PLAN = make_plan("full", [1], 1)


def scalar_twin(name: str, lr: float, deltas: list[float], x: float) -> list[float]:
    """One coordinate, one number at a time."""
    a = 0.0
    v = 0.0 if name == "momentum" else 1e-3**2
    path = []
    for delta in deltas:
        if name in ("sgd", "fedexp"):  # eta = 1 as long as nobody says how long the updates are
            x += lr * delta
        elif name == "momentum":
            v = 0.9 * v + delta
            x += lr * v
        else:
            square = delta * delta
            a = delta if name == "adagrad" else 0.9 * a + 0.1 * delta
            if name == "adagrad":
                v += square
            elif name == "adam":
                v = 0.99 * v + 0.01 * square
            elif v > square:
                v -= 0.01 * square
            elif v < square:
                v += 0.01 * square
            x += lr * a / (sqrt(v) + 1e-3)
        path.append(x)
    return path


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS)
@given(st.lists(st.lists(st.floats(-10, 10), min_size=3, max_size=3), min_size=1, max_size=8))
def test_equals_the_scalar_twin(name: str, delta_td: list[list[float]]) -> None:
    optimizer = make_server_optimizer(name)
    params_d = np.array([0.5, -1, 2], dtype=np.float32)
    state = optimizer.init(PLAN, params_d)
    twins = [
        scalar_twin(name, SERVER_OPTIMIZERS[name], [row[i] for row in delta_td], params_d[i])
        for i in range(3)
    ]
    for t, delta_d in enumerate(delta_td):
        params_d, state = optimizer.move(state, Step(t, params_d, np.array(delta_d)))
        np.testing.assert_allclose(params_d, [twin[t] for twin in twins], rtol=1e-5, atol=1e-5)
    assert params_d.dtype == np.float32


@pytest.mark.parametrize(
    ("optimizer", "step"),
    [
        (Sgd(0.5), 1.0),
        (Momentum(1.0, 0.9), 2.0),
        (Adaptive("adagrad", lr=0.1, tau=1.0), 0.1 * 2 / (sqrt(1 + 4) + 1)),
        (Adaptive("adam", lr=0.1, tau=1.0), 0.1 * 0.2 / (sqrt(0.99 + 0.04) + 1)),
        (
            Adaptive("yogi", lr=0.1, tau=1.0),
            0.1 * 0.2 / (sqrt(1 + 0.04) + 1),
        ),  # v = 1 < D^2 = 4, so it grows
    ],
)
def test_first_step_by_hand(optimizer: ServerOptimizer, step: float) -> None:
    start_d = np.ones(1, dtype=np.float32)
    params_d, _ = optimizer.move(optimizer.init(PLAN, start_d), Step(0, start_d, np.array([2.0])))
    assert params_d[0] == pytest.approx(1 + step, rel=1e-6)


@pytest.mark.parametrize("lr", [2, np.float32(2), np.int64(2), Fraction(2)])
def test_a_rate_is_any_real_number(lr: Any) -> None:
    assert any(part == Sgd(2) for part in make_plan("uniform", [1] * 4, 2, server_lr=lr).parts)


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS)
@pytest.mark.parametrize("lr", [0, 0.0, -0.1])
def test_a_rate_at_which_nothing_is_learnt_is_refused_by_every_way_to_write_it(
    name: str, lr: float
) -> None:
    words = re.escape(f"server_lr is {lr}; it must be in (0, inf)")
    for label, rate in (("uniform", lr), (f"uniform+server_lr={lr}", None)):
        with pytest.raises(DeltaflError, match=words):
            make_plan(label, [1] * 4, 2, server_optimizer=name, server_lr=rate)


def test_names_and_default_rates() -> None:
    assert make_server_optimizer("sgd") == Sgd(1.0)
    assert make_server_optimizer("fedexp", 0.5) == FedExP(0.5, 1e-3)
    assert make_server_optimizer("momentum", 0.3) == Momentum(0.3, 0.9)
    assert make_server_optimizer("adam") == Adaptive("adam", 0.01, 0.9, 0.99, 1e-3)
    assert make_server_optimizer("momentum", momentum=0.0) == Momentum(1.0, 0.0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: make_server_optimizer("adm"), "did you mean 'adam'"),
        (
            lambda: make_server_optimizer("yogi", momentum=0.9),
            "choose the server optimizer 'momentum'",
        ),
        (lambda: Adaptive("yogy"), "did you mean 'yogi'"),
        (lambda: FedExP(epsilon=0.0), "epsilon is 0.0; it must be in"),
        (lambda: Sgd(float("nan")), "lr is nan; it must be in"),
        (lambda: Momentum(1.0, 1.0), "beta is 1.0; it must be in"),
        (lambda: Adaptive("adam", beta1=1.5), "beta1 is 1.5; it must be in"),
        (lambda: Adaptive("adam", beta2=-1.0), "beta2 is -1.0; it must be in"),
        (lambda: Adaptive("yogi", tau=0.0), "tau is 0.0; it must be in"),
    ],
)
def test_server_optimizers_that_cannot_be_are_refused(
    make: Callable[[], object], words: str
) -> None:
    with pytest.raises(DeltaflError, match=re.escape(words)):
        make()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_is_none_is_as_if_it_were_left_out(name: str) -> None:
    none: dict[str, Any] = {name: None}
    assert make_plan("uniform", [1] * 4, 2, **none).parts == (Sgd(1.0),)
    # An object takes its place, as that of what is left out.
    own = (Momentum(0.3),)
    assert make_plan("uniform", [1] * 4, 2, parts=own, **none).parts == own


def test_a_none_in_a_label_switches_a_part_off() -> None:
    assert make_plan("uniform+mime=None", [1] * 4, 2, mime=0.5).parts == (Sgd(1.0),)
