"""From finished runs to the comparison a person reads: summary, table, remarks, plots.

The map: ``Run`` (one sampler x one seed) -> ``summarise`` -> ``Summary`` -> ``write_summary`` / ``comparison_table`` /
``remarks``; ``draw_plots`` draws the curves of the runs beside the summary's threshold and baseline.
"""

from .curves import Run
from .plots import draw_plots
from .remarks import remarks
from .schema import Summary
from .summary import read_summary, summarise, write_summary
from .table import comparison_table

__all__ = [
    "Run",
    "Summary",
    "comparison_table",
    "draw_plots",
    "read_summary",
    "remarks",
    "summarise",
    "write_summary",
]
