"""deltafl in a Flower federation: the same samplers and weights as in the simulator. Extra ``flower``.

Server: ``DeltaStrategy``, with ``WeightedClipping``. Client: ``delta_mod``, ``register``, ``LocalSteps``. What runs
without Flower is in ``federation.py`` (the rounds over clients who come and go), ``rules.py`` and ``roster.py`` (what it
is about), ``arrays.py``, ``growth.py``, ``outage.py``, ``saved.py``, ``identity.py``, ``clipping.py``, ``sketched.py`` and
``local_steps.py``; ``strategy.py``, ``registration.py``, ``messages.py`` and ``client.py`` translate from and to messages.
"""

from ..errors import require

require("flwr", "flower")

from .client import delta_mod, register  # noqa: E402
from .clipping import WeightedClipping  # noqa: E402
from .local_steps import LocalSteps  # noqa: E402
from .strategy import DeltaStrategy  # noqa: E402

__all__ = ["DeltaStrategy", "LocalSteps", "WeightedClipping", "delta_mod", "register"]
