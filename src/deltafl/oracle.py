"""What only a simulation knows before the draw: an oracle over a table of everybody's updates."""

from functools import cached_property

import numpy as np
import numpy.typing as npt

from .replies import measure
from .types import FloatArray, IntArray, Params, Reports


class KnownUpdates:
    """An ``Oracle`` (see ``types.py``) over a table: what every client would send this round.

    Attributes:
        update_md: float32 (m, d), the updates u_i.
        weight_m: float64 (m,), the weights w_i; deviations are about ubar = sum w_i u_i.
        columns: The other columns of the reports: losses, step variances, numbers of steps.
    """

    def __init__(
        self,
        update_md: npt.ArrayLike,
        weight_m: FloatArray,
        step_variance_m: FloatArray | None = None,
        loss_m: FloatArray | None = None,
        num_steps_m: IntArray | None = None,
    ) -> None:
        self.update_md: Params = np.asarray(update_md, dtype=np.float32)
        self.weight_m = weight_m
        self.columns = Reports.make(len(weight_m), loss=loss_m, step_variance=step_variance_m, num_steps=num_steps_m)

    @cached_property
    def _reports(self) -> Reports:
        return measure(self.update_md, self.columns, self.weight_m)

    def reports(self) -> Reports:
        """What all m clients report, with zeta about ubar."""
        return self._reports

    def losses(self, client_k: IntArray) -> FloatArray:
        """The losses of some clients, float64 (k,)."""
        losses_k: FloatArray = self.columns.loss_n[client_k]
        return losses_k
