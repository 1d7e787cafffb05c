"""Local training: ``serial`` is the plain loop, ``fast`` and ``batched`` do the same faster.

``route`` chooses.
"""

from ...errors import MissingExtraError

try:
    import torch as torch
    from torch import Tensor as Tensor
except ImportError as error:
    raise MissingExtraError("torch", "sim") from error
