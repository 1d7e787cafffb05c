"""What follows each round of a run: the protocol is in ``callback.py``."""
