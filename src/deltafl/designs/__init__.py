"""Sampling designs: scores become expectations, expectations become a cohort; ``table.py`` lists
them.
"""

from .exact import every_cohort
from .table import DESIGNS, Design, draw_cohort, find_design

__all__ = ["DESIGNS", "Design", "draw_cohort", "every_cohort", "find_design"]
