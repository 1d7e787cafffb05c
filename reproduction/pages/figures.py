"""Curves of records; see ``deltafl.analysis.plots``."""

from collections.abc import Sequence

from deltafl.analysis import plots
from deltafl.simulation.record import RunRecord


def curve_band(records: Sequence[RunRecord], y: str, smoothing: int = 1) -> plots.Band:
    """Mean and range over seeds of what is drawn: percent, loss, or log10 loss."""
    return plots.curve_band([record.run() for record in records], y, smoothing)
