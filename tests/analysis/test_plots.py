"""The pictures: which files, what size, the same bytes twice, no trace in Matplotlib's global
state.
"""

import struct
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest

from deltafl.analysis import Run, curve_band, draw_plots, looks, summarise
from deltafl.errors import MissingExtraError
from tools.runs import make_run, runs_of


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def draw(runs: list[Run], directory: Path, threshold: float | None = 0.7) -> list[Path]:
    return draw_plots(runs, summarise(runs, threshold), directory)


@pytest.mark.drawn
def test_files_sizes_and_the_same_bytes_twice(tmp_path: Path) -> None:
    runs = runs_of(fedavg=[3, 4], full=[1, 2], fedis=[2, None])
    first = draw(runs, tmp_path / "deep" / "a")
    again = draw(runs, tmp_path / "b")
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
        "from tools.runs import runs_of; from deltafl.analysis import draw_plots, summarise;"
        "runs = runs_of(fedavg=[3, 4]); assert 'matplotlib' not in sys.modules;"
        "draw_plots(runs, summarise(runs, 0.7), tempfile.mkdtemp()); assert 'matplotlib.pyplot' "
        "not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parents[1])]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
def test_losses_that_are_hard_to_draw(
    loss_r: np.ndarray[tuple[int], np.dtype[np.float64]], tmp_path: Path
) -> None:
    runs = [make_run("fedavg", 0, 3, "loss"), make_run("fedis", 0, 3, "loss", loss_r=loss_r)]
    assert [path.name for path in draw(runs, tmp_path, 0.5)] == ["loss.png", "selections.png"]


def test_the_band_is_least_to_greatest_at_shared_rounds() -> None:
    runs = [
        make_run("a", 0, 1, num_rounds=3, accuracy_r=np.array([0.1, 0.2, 0.6])),
        make_run(
            "a", 1, 1, num_rounds=2, round_r=np.array([1, 3]), accuracy_r=np.array([0.3, 0.2])
        ),
    ]
    band = curve_band(runs, "accuracy")
    assert band.round_r.tolist() == [1, 3]
    assert band.mean_r.tolist() == pytest.approx([20, 40])
    assert band.low_r.tolist() == [10, 20]
    assert band.high_r.tolist() == [30, 60]


def test_a_diverged_seed_makes_a_hole_in_the_band() -> None:
    runs = [make_run("a", 0, 1), make_run("a", 1, 1, loss_r=np.array([*[0.1] * 8, np.inf, np.nan]))]
    band = curve_band(runs, "loss")
    assert np.isfinite(band.mean_r).tolist() == [True] * 8 + [False] * 2


def test_missing_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"deltafl\[plot\]"):
        draw(runs_of(fedavg=[3]), tmp_path)


def test_a_method_looks_the_same_in_every_picture_and_its_variants_differ() -> None:
    one = looks(["fedavg", "uniform", "osmd"])
    two = looks(["osmd", "uniform@pivotal", "uniform"])
    assert (one["fedavg"].colour, one["osmd"]) == ("#000000", two["osmd"])
    assert (two["uniform"].colour, two["uniform"].marker) == (
        one["uniform"].colour,
        one["uniform"].marker,
    )
    assert two["uniform"].dash != two["uniform@pivotal"].dash
    assert len({look[:3] for look in looks([f"own-{i}" for i in range(17)]).values()}) == 17
