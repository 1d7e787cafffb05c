"""What a control variate says of a round: c_i of the clients that replied, and of all together."""

from collections.abc import Callable
from typing import NamedTuple

from ..types import FloatArray


class ControlValue(NamedTuple):
    """``total_d`` = sum_j w_j c_j over all clients, and c_i of the cohort, (n, d), or (1, d) if
    they are all equal.
    """

    total_d: FloatArray
    control_nd: FloatArray

    def part(self, part: slice) -> "ControlValue":
        """A stretch of the parameters."""
        return ControlValue(self.total_d[part], self.control_nd[:, part])


class ComposedValue(ControlValue):
    """That of a control variate that is made of others, whose values it holds."""

    held: tuple[ControlValue, ...]

    @classmethod
    def of(
        cls,
        total_d: FloatArray,
        control_nd: FloatArray,
        *held: ControlValue,
    ) -> "ComposedValue":
        """Make one of its values and those of the others."""
        value = cls(total_d, control_nd)
        value.held = held
        return value

    def part(self, part: slice) -> "ComposedValue":
        held = (value.part(part) for value in self.held)
        return ComposedValue.of(self.total_d[part], self.control_nd[:, part], *held)


#: ``value`` on a stretch of the parameters.
Reader = Callable[[slice], ControlValue]
