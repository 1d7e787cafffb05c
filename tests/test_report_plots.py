"""The pictures: which files, what size, the same bytes twice, no trace in Matplotlib's global state."""

import struct
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafl.analysis import Run, draw_plots, summarise
from deltafl.analysis.plot_curves import mean_band, spread
from deltafl.analysis.plot_style import looks
from deltafl.errors import DeltaflError, MissingExtraError
from test_report_summary import make_run, runs_of


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def draw(runs: list[Run], directory: Path, threshold: float | None = 0.7) -> list[Path]:
    return draw_plots(runs, summarise(runs, threshold), directory)


def test_files_sizes_and_the_same_bytes_twice(tmp_path: Path) -> None:
    runs = runs_of(fedavg=[3, 4], full=[1, 2], fedis=[2, None])
    first, again = draw(runs, tmp_path / "deep" / "a"), draw(runs, tmp_path / "b")
    assert [path.name for path in first] == ["accuracy.png", "loss.png", "selections.png"]
    for one, other in zip(first, again, strict=True):
        width, height = png_size(one)
        assert width == 1080
        assert 250 < height < 1000
        assert one.read_bytes() == other.read_bytes()


def test_a_user_style_changes_nothing_and_is_left_alone(tmp_path: Path) -> None:
    runs = runs_of(fedavg=[3, 4], fedis=[2, 3])
    plain = draw(runs, tmp_path / "a")
    with mpl.rc_context({"font.size": 20.0, "axes.facecolor": "black", "savefig.dpi": 40}):
        before = dict(mpl.rcParams)
        styled = draw(runs, tmp_path / "b")
        assert dict(mpl.rcParams) == before
    assert [path.read_bytes() for path in plain] == [path.read_bytes() for path in styled]


def test_pyplot_is_never_imported() -> None:
    code = (
        "import sys, tempfile; sys.path.insert(0, sys.argv[1]);"
        "from test_report_summary import runs_of; from deltafl.analysis import draw_plots, summarise;"
        "runs = runs_of(fedavg=[3, 4]); assert 'matplotlib' not in sys.modules;"
        "draw_plots(runs, summarise(runs, 0.7), tempfile.mkdtemp()); assert 'matplotlib.pyplot' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_task_without_accuracy_has_no_accuracy_picture(tmp_path: Path) -> None:
    assert [path.name for path in draw(runs_of("loss", fedavg=[3], fedis=[2]), tmp_path, 0.5)] == [
        "loss.png",
        "selections.png",
    ]


@pytest.mark.parametrize("num_samplers", [1, 5, 15])
def test_any_number_of_samplers(num_samplers: int, tmp_path: Path) -> None:
    runs = [make_run(f"sampler-{i}@multinomial", 0, 3) for i in range(num_samplers)]
    assert all(path.stat().st_size > 5000 for path in draw(runs, tmp_path))


@pytest.mark.parametrize(
    "loss_r",
    [
        np.full(10, np.nan),
        np.array([2.0, *[np.inf] * 9]),
        np.geomspace(1e-8, 1e12, 10),
        np.full(10, -1.0),
        np.zeros(10),
    ],
)
def test_losses_that_are_hard_to_draw(loss_r: np.ndarray[tuple[int], np.dtype[np.float64]], tmp_path: Path) -> None:
    runs = [make_run("fedavg", 0, 3, "loss"), make_run("fedis", 0, 3, "loss", loss_r=loss_r)]
    assert len(draw(runs, tmp_path, 0.5)) == 2


def test_only_diverged_runs_and_one_evaluation_are_drawn(tmp_path: Path) -> None:
    assert len(draw([make_run("fedavg", 0, 3, "loss", loss_r=np.full(10, np.nan))], tmp_path / "a", 0.5)) == 2
    assert len(draw([make_run("fedavg", 0, 1, num_rounds=1)], tmp_path / "b", None)) == 3


def test_a_client_far_out_and_clients_never_drawn(tmp_path: Path) -> None:
    draws_m = np.zeros(40, dtype=np.int64)
    for i, runs in enumerate(([make_run("md", 0, 3, draws_m=draws_m)], [make_run("md", 0, 3, draws_m=draws_m.copy())])):
        runs[0].draws_m[0] = 500 * i
        assert len(draw(runs, tmp_path / str(i))) == 3


def test_the_band_is_least_to_greatest_at_shared_rounds() -> None:
    runs = [
        make_run("a", 0, 1, num_rounds=3, accuracy_r=np.array([0.1, 0.2, 0.6])),
        make_run("a", 1, 1, num_rounds=2, round_r=np.array([1, 3]), accuracy_r=np.array([0.3, 0.2])),
    ]
    band = mean_band(runs, "accuracy")
    assert band.round_r.tolist() == [1, 3]
    assert band.mean_r.tolist() == pytest.approx([0.2, 0.4])
    assert band.low_r.tolist() == [0.1, 0.2]
    assert band.high_r.tolist() == [0.3, 0.6]


def test_a_diverged_seed_makes_a_hole_in_the_band() -> None:
    runs = [make_run("a", 0, 1), make_run("a", 1, 1, loss_r=np.array([*[0.1] * 8, np.inf, np.nan]))]
    band = mean_band(runs, "loss")
    assert np.isfinite(band.mean_r).tolist() == [True] * 8 + [False] * 2


@given(st.lists(st.floats(0, 1), max_size=20))
def test_spread_keeps_distance_order_and_room(places: list[float]) -> None:
    moved = np.array(spread(places, gap=0.05, low=0.0, high=1.0))
    gap = min(0.05, 1 / max(len(places) - 1, 1))
    order = np.argsort(places, kind="stable")
    assert (np.diff(moved[order]) >= gap - 1e-9).all()
    assert ((moved >= -1e-9) & (moved <= 1 + 1e-9)).all()


def test_spread_leaves_what_is_far_apart_and_centres_what_collides() -> None:
    assert spread([0.9, 0.1], gap=0.05, low=0, high=1) == pytest.approx([0.9, 0.1])
    assert spread([0.5, 0.5, 0.5], gap=0.1, low=0, high=1) == pytest.approx([0.4, 0.5, 0.6])


def test_looks_differ_and_the_baseline_is_black() -> None:
    labels = [f"s{i}" for i in range(17)]
    chosen = looks(labels, "s3")
    assert chosen["s3"].colour == "#000000"
    assert len(set(chosen.values())) == 17


def test_missing_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"deltafl\[plot\]"):
        draw(runs_of(fedavg=[3]), tmp_path)


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    runs = runs_of(fedavg=[3])
    with pytest.raises(DeltaflError, match="no run"):
        draw_plots([], summarise(runs, 0.7), tmp_path)
