"""Cells of tables; see ``deltafl.analysis.page``."""

from deltafl.analysis.page import DASH, Cells, csv_text, fixed, markdown, plus_minus

__all__ = ["DASH", "Cells", "csv_text", "fixed", "markdown", "plus_minus"]
