"""From finished runs to what a person reads: the run table, statistics, summary, tables, pictures, pages.

``Run`` (one sampler with one seed) -> ``summarise`` -> ``Summary`` -> ``write_summary`` / ``comparison_table`` /
``remarks``; ``draw_plots`` draws the curves of the runs. ``compare`` sets two methods against each other by any
``Measure``; the functions of ``statistics`` state their formulas.
"""

from .measures import (
    Measure,
    Statement,
    accuracy,
    best_within,
    centre,
    compare,
    late_loss,
    late_probe,
    rounds_to,
    second_half,
)
from .page import DASH, Cells, csv_text, fixed, folded, markdown, plus_minus, plus_minus_short, short
from .plots import (
    CAPTION,
    DPI,
    GREY,
    INK,
    PALE,
    WIDTH,
    Band,
    Line,
    Look,
    band_of,
    curve_band,
    draw_panels,
    draw_plots,
    looks,
    small_png,
    styled,
)
from .runs import Run, base_name
from .statistics import (
    WINDOW,
    Interval,
    area_under,
    fieller,
    mean_and_sd,
    mean_interval,
    mean_of_best,
    ratio_of_means,
    reach,
    t_quantile,
)
from .summary import Summary, read_summary, summarise, write_summary
from .table import DIVERGED, bias_remark, comparison_table, human_bytes, human_seconds, remarks

__all__ = ["CAPTION", "DASH", "DIVERGED", "DPI", "GREY", "INK", "PALE", "WIDTH", "WINDOW", "Band", "Cells", "Interval"]
__all__ += ["Line", "Look", "Measure", "Run", "Statement", "Summary", "accuracy", "area_under", "band_of", "base_name"]
__all__ += ["best_within", "bias_remark", "centre", "compare", "comparison_table", "csv_text", "curve_band"]
__all__ += ["draw_panels", "draw_plots", "fieller", "fixed", "folded", "human_bytes", "human_seconds", "late_loss"]
__all__ += ["late_probe", "looks", "markdown", "mean_and_sd", "mean_interval", "mean_of_best", "plus_minus"]
__all__ += ["plus_minus_short", "ratio_of_means", "reach", "read_summary", "remarks", "rounds_to", "second_half"]
__all__ += ["short", "small_png", "styled", "summarise", "t_quantile", "write_summary"]
