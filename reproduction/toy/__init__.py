"""Figures 3 and 5: the toy, with every cohort enumerated."""
