"""deltafl in an NVFlare federation: the samplers and weights of the simulator. Needs the extra
``nvflare``.

Server: the controller ``DeltaFedAvg``. Client: ``DeltaClient``, ``LocalSteps``,
``corrected_steps``.
"""

from ..errors import require

for _package in ("nvflare", "filelock"):
    require(_package, "nvflare")

from ..federation.local_work import LocalSteps, corrected_steps  # noqa: E402
from .client import DeltaClient  # noqa: E402
from .controller import DeltaFedAvg  # noqa: E402

__all__ = ["DeltaClient", "DeltaFedAvg", "LocalSteps", "corrected_steps"]
