"""What the server does with a round, in parts; ``part.py`` says what a part is, ``table.py`` has a
row for each.
"""

from .optimizers import ServerOptimizer
from .part import Intake, PlanOfParts, ServerPart, Step
from .table import make_parts

__all__ = [
    "Intake",
    "PlanOfParts",
    "ServerOptimizer",
    "ServerPart",
    "Step",
    "make_parts",
]
