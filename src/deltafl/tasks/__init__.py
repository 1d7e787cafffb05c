"""Data sets, partitions and models: what is learnt, and who holds which part of it."""
