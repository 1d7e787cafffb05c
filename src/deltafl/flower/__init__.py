"""deltafl in a Flower federation: the samplers and weights of the simulator. Needs the extra ``flower``.

Server: ``DeltaStrategy``, optionally with ``DifferentialPrivacy``. Client: ``delta_mod``, ``register``, ``LocalSteps``.

Flower's messages appear here alone; ``deltafl.federation`` has the rounds and does not know Flower.
"""

from ..errors import require

for _package in ("flwr", "filelock"):
    require(_package, "flower")

from ..federation.local_work import LocalSteps  # noqa: E402
from ..server.privacy import DifferentialPrivacy  # noqa: E402
from .client import delta_mod, register  # noqa: E402
from .strategy import DeltaStrategy  # noqa: E402

__all__ = ["DeltaStrategy", "DifferentialPrivacy", "LocalSteps", "delta_mod", "register"]
