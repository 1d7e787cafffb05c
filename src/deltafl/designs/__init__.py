"""Sampling designs: scores become expectations, expectations become a cohort; ``table.py`` lists them."""
