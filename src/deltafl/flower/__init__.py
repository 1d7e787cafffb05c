"""deltafl in a Flower federation: the same samplers and weights as in the simulator. Extra ``flower``.

Server: ``DeltaStrategy``, with ``WeightedClipping``. Client: ``delta_mod``, ``register``, ``LocalSteps``. Messages are
translated in ``strategy.py``, ``registration.py``, ``messages.py``, ``telling.py`` and ``client.py``; everything else
runs without Flower: ``federation.py`` is the rounds over clients who come and go.
"""

from ..errors import require

require("flwr", "flower")

from .client import delta_mod, register  # noqa: E402
from .clipping import WeightedClipping  # noqa: E402
from .local_steps import LocalSteps  # noqa: E402
from .strategy import DeltaStrategy  # noqa: E402

__all__ = ["DeltaStrategy", "LocalSteps", "WeightedClipping", "delta_mod", "register"]
