"""Local training: ``serial`` is the plain loop, ``fast`` and ``batched`` do the same faster.

``route`` chooses.
"""

from ...tasks.modules import Tensor as Tensor
from ...tasks.modules import torch as torch
