"""From finished runs to what a person reads: the run table, statistics, summary, tables, pictures.

``Run`` (one sampler with one seed) -> ``summarise`` -> ``Summary`` -> ``headline`` and ``remarks``,
which ``comparison_table`` and ``write_report`` show; ``draw_plots`` draws the curves of the runs.
The functions of ``statistics`` state their formulas.
"""

from .._lazy import loader, names_of

__all__ = sorted(names_of(__file__))  # noqa: PLE0605
__getattr__ = loader(__name__, names_of(__file__))
