"""The canvas of a page's pictures."""

from deltafl.analysis.plots import Line, draw_panels, finish, grid, legend_rows, small_png, styled

__all__ = ["Line", "draw_panels", "finish", "grid", "legend_rows", "small_png", "styled"]
