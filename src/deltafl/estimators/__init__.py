"""Estimators: replies become one estimate of the full-participation update; ``table.py`` lists
them.
"""
