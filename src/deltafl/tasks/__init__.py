"""Data sets, partitions and models: what is learnt, and who holds which part of it."""

from .huggingface import from_huggingface

__all__ = ["from_huggingface"]
