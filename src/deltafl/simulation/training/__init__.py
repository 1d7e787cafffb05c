"""Local training: ``local.py`` tells it plainly, the other files do the same faster; ``routes.py`` chooses."""
