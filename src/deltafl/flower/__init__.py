"""deltafl in a Flower federation: the samplers and weights of the simulator. Needs the extra
``flower``.

Server: ``DeltaStrategy``, optionally with ``DifferentialPrivacy``. Client: ``delta_mod``,
``register``, ``LocalSteps``, ``corrected_steps`` with ``take_correction``.

Flower's messages appear here alone; ``deltafl.federation`` has the rounds and does not know Flower.
"""

from ..errors import require

for _package in ("flwr", "filelock"):
    require(_package, "flower")

from ..federation.local_work import LocalSteps, corrected_steps  # noqa: E402
from ..server.privacy import DifferentialPrivacy  # noqa: E402
from .client import delta_mod, register, take_correction  # noqa: E402
from .strategy import DeltaStrategy  # noqa: E402

__all__ = [
    "DeltaStrategy",
    "DifferentialPrivacy",
    "LocalSteps",
    "corrected_steps",
    "delta_mod",
    "register",
    "take_correction",
]
