"""What follows each round of a run: one protocol (``callback.py``), one file for each concern."""
