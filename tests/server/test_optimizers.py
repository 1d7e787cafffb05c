"""Every rule against a slow scalar twin written from Reddi et al. 2021, algorithm 2, and first steps by hand."""

from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import same_tree
from deltafl import Adaptive, DeltaflError, Momentum, ServerOptimizer, Sgd, make_server_optimizer
from deltafl.server.optimizers import SERVER_OPTIMIZERS


def scalar_twin(name: str, lr: float, deltas: list[float], x: float) -> list[float]:
    """One coordinate, one number at a time."""
    a, v = 0.0, 0.0 if name == "momentum" else 1e-3**2
    path = []
    for delta in deltas:
        if name == "sgd":
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
    params_d, state = np.array([0.5, -1, 2], dtype=np.float32), optimizer.init(3)
    twins = [scalar_twin(name, SERVER_OPTIMIZERS[name], [row[i] for row in delta_td], params_d[i]) for i in range(3)]
    for t, delta_d in enumerate(delta_td):
        params_d, state = optimizer.step(params_d, np.array(delta_d), state)
        np.testing.assert_allclose(params_d, [twin[t] for twin in twins], rtol=1e-5, atol=1e-5)
    assert params_d.dtype == np.float32


@pytest.mark.parametrize(
    ("optimizer", "step"),
    [
        (Sgd(), 2.0),
        (Sgd(0.5), 1.0),
        (Momentum(1.0, 0.9), 2.0),
        (Adaptive("adagrad", lr=0.1, tau=1.0), 0.1 * 2 / (sqrt(1 + 4) + 1)),
        (Adaptive("adam", lr=0.1, tau=1.0), 0.1 * 0.2 / (sqrt(0.99 + 0.04) + 1)),
        (Adaptive("yogi", lr=0.1, tau=1.0), 0.1 * 0.2 / (sqrt(1 + 0.04) + 1)),  # v = 1 < D^2 = 4, so it grows
    ],
)
def test_first_step_by_hand(optimizer: ServerOptimizer, step: float) -> None:
    params_d, _ = optimizer.step(np.array([1.0], dtype=np.float32), np.array([2.0]), optimizer.init(1))
    assert params_d[0] == pytest.approx(1 + step, rel=1e-6)


def test_second_step_of_momentum_by_hand() -> None:
    optimizer = Momentum(lr=0.5, beta=0.8)
    params_d, state = optimizer.step(np.zeros(1, dtype=np.float32), np.array([1.0]), optimizer.init(1))
    params_d, state = optimizer.step(params_d, np.array([1.0]), state)
    assert params_d[0] == pytest.approx(0.5 * 1 + 0.5 * 1.8)
    assert state.velocity_d == pytest.approx([1.8])


def test_the_square_of_yogi_falls_slowly_and_that_of_adam_fast() -> None:
    """After a large D and then small ones, yogi's v shrinks by (1 - b2) D^2 a step, adam's by a factor."""
    squares = {}
    for rule in ("adam", "yogi"):
        optimizer = Adaptive(rule, tau=1.0, beta2=0.9)
        params_d, state = optimizer.step(np.zeros(1, dtype=np.float32), np.array([10.0]), optimizer.init(1))
        path = [state.square_d[0]]
        for _ in range(5):
            params_d, state = optimizer.step(params_d, np.array([0.1]), state)
            path.append(state.square_d[0])
        squares[rule] = np.array(path)
    np.testing.assert_allclose(np.diff(squares["yogi"]), -0.1 * 0.1**2, rtol=1e-9)
    assert squares["yogi"][0] == pytest.approx(1 + 0.1 * 100)
    assert squares["adam"][5] == pytest.approx(10.9 * 0.9**5 + 0.01 * (1 - 0.9**5))


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS)
def test_arguments_are_left_as_they_are(name: str) -> None:
    optimizer = make_server_optimizer(name)
    params_d, delta_d, state = np.ones(2, dtype=np.float32), np.array([1.0, -2.0]), optimizer.init(2)
    _, later = optimizer.step(params_d, delta_d, state)
    assert params_d.tolist() == [1, 1]
    assert delta_d.tolist() == [1, -2]
    assert same_tree(state, optimizer.init(2))
    assert type(later) is type(state)


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS)
def test_a_zero_estimate_at_the_start_moves_nothing(name: str) -> None:
    optimizer = make_server_optimizer(name)
    params_d, _ = optimizer.step(np.ones(2, dtype=np.float32), np.zeros(2), optimizer.init(2))
    assert params_d.tolist() == [1, 1]


def test_names_and_default_rates() -> None:
    assert make_server_optimizer("sgd") == Sgd(1.0)
    assert make_server_optimizer("momentum", 0.3) == Momentum(0.3, 0.9)
    assert make_server_optimizer("adam") == Adaptive("adam", 0.01, 0.9, 0.99, 1e-3)
    assert make_server_optimizer("momentum", momentum=0.5) == Momentum(1.0, 0.5)
    assert make_server_optimizer("momentum", momentum=0.0) == Momentum(1.0, 0.0)
    with pytest.raises(DeltaflError, match="did you mean 'adam'"):
        make_server_optimizer("adm")
    with pytest.raises(DeltaflError, match="did you mean 'yogi'"):
        Adaptive("yogy")


@pytest.mark.parametrize("name", [name for name in SERVER_OPTIMIZERS if name != "momentum"])
def test_only_momentum_takes_a_momentum(name: str) -> None:
    with pytest.raises(DeltaflError, match="choose the server optimizer 'momentum'"):
        make_server_optimizer(name, momentum=0.9)


@pytest.mark.parametrize("beta", [1.0, -0.1, float("nan")])
def test_impossible_momenta(beta: float) -> None:
    with pytest.raises(DeltaflError, match="it must be in"):
        Momentum(1.0, beta)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sgd(float("nan")),
        lambda: Sgd(-1.0),
        lambda: Momentum(float("inf")),
        lambda: Adaptive("adam", beta1=1.5),
        lambda: Adaptive("adam", beta2=-1.0),
        lambda: Adaptive("yogi", tau=0.0),
        lambda: make_server_optimizer("adagrad", lr=-0.1),
    ],
)
def test_server_optimizers_that_cannot_be_are_refused(make: object) -> None:
    with pytest.raises(DeltaflError, match="it must be in"):
        make()  # type: ignore[operator]
