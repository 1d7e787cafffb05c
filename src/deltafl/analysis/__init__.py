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
from .recommend import Evidence, Recommendation, read_evidence, recommend
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

__all__ = ["CAPTION", "DASH", "DIVERGED", "DPI", "GREY", "INK", "PALE", "WIDTH", "WINDOW", "Band", "Cells", "Evidence"]
__all__ += ["Interval", "Line", "Look", "Measure", "Recommendation", "Run", "Statement", "Summary", "accuracy"]
__all__ += ["area_under", "band_of", "base_name", "best_within", "bias_remark", "centre", "compare", "comparison_table"]
__all__ += ["csv_text", "curve_band", "draw_panels", "draw_plots", "fieller", "fixed", "folded", "human_bytes"]
__all__ += ["human_seconds", "late_loss", "late_probe", "looks", "markdown", "mean_and_sd", "mean_interval"]
__all__ += ["mean_of_best", "plus_minus", "plus_minus_short", "ratio_of_means", "reach", "read_evidence"]
__all__ += ["read_summary", "recommend", "remarks", "rounds_to", "second_half", "short", "small_png", "styled"]
__all__ += ["summarise", "t_quantile", "write_summary"]
