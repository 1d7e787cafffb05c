"""From finished runs to what a person reads: the run table, statistics, summary, tables, pictures.

``Run`` (one sampler with one seed) -> ``summarise`` -> ``Summary`` -> ``headline`` and ``remarks``,
which ``comparison_table`` and ``write_report`` show; ``draw_plots`` draws the curves of the runs.
The functions of ``statistics`` state their formulas.
"""

from ..samplers import base_name
from .advice import Advice, ErrorRow
from .bands import Band, band_of, curve_band
from .forecast import Forecast
from .looks import GREY, INK, PALE, Look, looks
from .numbers import Summary
from .plots import (
    CAPTION,
    DPI,
    WIDTH,
    Line,
    Panel,
    draw_panels,
    draw_plots,
    panel_title,
    small_png,
    styled,
)
from .prices import Prices, used
from .recommend import Evidence, Recommendation, read_evidence, recommend
from .report import Part, write_report
from .runs import Run
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
from .summary import read_summary, summarise, write_summary
from .table import comparison_table
from .text import DIVERGED, human_amount, human_bytes
from .verdict import bias_remark, headline, remarks

__all__ = [
    "CAPTION",
    "DIVERGED",
    "DPI",
    "GREY",
    "INK",
    "PALE",
    "WIDTH",
    "WINDOW",
    "Advice",
    "Band",
    "ErrorRow",
    "Evidence",
    "Forecast",
    "Interval",
    "Line",
    "Look",
    "Panel",
    "Part",
    "Prices",
    "Recommendation",
    "Run",
    "Summary",
    "area_under",
    "band_of",
    "base_name",
    "bias_remark",
    "comparison_table",
    "curve_band",
    "draw_panels",
    "draw_plots",
    "fieller",
    "headline",
    "human_amount",
    "human_bytes",
    "looks",
    "mean_and_sd",
    "mean_interval",
    "mean_of_best",
    "panel_title",
    "ratio_of_means",
    "reach",
    "read_evidence",
    "read_summary",
    "recommend",
    "remarks",
    "small_png",
    "styled",
    "summarise",
    "t_quantile",
    "used",
    "write_report",
    "write_summary",
]
