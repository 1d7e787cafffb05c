"""The comparison as pictures: ``accuracy.png``, ``loss.png`` and ``selections.png``. Needs Matplotlib.

Figures are made with the object-oriented interface and the Agg canvas, so no window, no global figure and no
``matplotlibrc`` of the user plays a part: the same runs give the same bytes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import require
from .curves import Run, by_sampler, check_runs
from .plot_style import looks, png_of, styled
from .schema import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_plots(runs: Sequence[Run], summary: Summary, directory: Path | str) -> list[Path]:
    """Draw the pictures of a comparison.

    ``accuracy.png`` (left out for a task without accuracy) and ``loss.png``: mean over seeds with a band from the least
    to the greatest seed and, for the metric of the comparison, the threshold. ``selections.png``: how often each client
    was drawn, clients sorted by that.

    Args:
        runs: The runs that ``summary`` was made from.
        summary: Gives the threshold and the baseline, which is drawn in black.
        directory: Where the files go; made if it does not exist.

    Returns:
        The files written.

    Raises:
        MissingExtraError: If Matplotlib is not installed.
        DeltaflError: If the runs cannot be compared.
    """
    require("matplotlib", "plot")
    from .plot_curves import curves_figure
    from .plot_selections import selections_figure

    check_runs(runs)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    groups = by_sampler(runs)
    look_of = looks(list(groups), summary.baseline)
    written = []
    with styled():
        if any(np.isfinite(run.accuracy_r).any() for run in runs):
            written.append(_save(curves_figure(groups, look_of, summary, "accuracy"), directory / "accuracy.png"))
        written.append(_save(curves_figure(groups, look_of, summary, "loss"), directory / "loss.png"))
        written.append(_save(selections_figure(groups, look_of), directory / "selections.png"))
    return written


def _save(figure: "Figure", path: Path) -> Path:
    path.write_bytes(png_of(figure))
    return path
