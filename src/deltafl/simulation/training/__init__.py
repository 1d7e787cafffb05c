"""Local training: ``local.py`` tells it plainly, the other files do the same faster; ``routes.py`` chooses."""

from ...errors import MissingExtraError

try:
    import torch as torch
except ImportError as error:
    raise MissingExtraError("torch", "sim") from error
