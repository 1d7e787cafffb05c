"""What a run's model has beside its flat vector: buffers and counters, which the rounds average,
and local arrays, of which every client has its own.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..model.arrays import Arrays
from ..model.parts import MEANS, ModelParts
from ..model.vectors import WeightedMean, mean_rest
from ..scale.rows import RowFormat, Rows, put_rows
from ..scale.sound import not_sound
from ..types import Array, FloatArray, IntArray, Within

#: The folder of clients' local arrays in that of a run's memory.
LOCAL = "local"


def local_rows(memory: Path | None) -> RowFormat:
    """How local arrays are kept: in a folder in that of a run's memory, or in RAM."""
    return RowFormat(folder=None if memory is None else str(memory / LOCAL), is_bits=True)


class Rest(NamedTuple):
    """``RoundState.rest`` of a run whose model has buffers, counters or local arrays."""

    shared: Arrays  #: buffers and counters, as they are sent
    #: For each client the bits in which its local arrays differ from the initial ones, as float32:
    #: a row of zeros, which takes no memory, is that of a client that was never selected.
    own: Annotated[Rows, Within("[-inf, inf]", unknown=True)]


def bytes_sent(rest: Any) -> int:
    """Bytes that travel beside the vector, in each direction."""
    if not rest:
        return 0
    return sum(array.nbytes for array in rest.shared.values())


class RestOfModel:
    """Reads and writes ``Rest`` for one model, which begins with ``arrays``."""

    def __init__(self, parts: ModelParts, arrays: Arrays) -> None:
        self.parts = parts
        self._shared = {name: arrays[name].copy() for name in parts.names(*MEANS)}
        self._local = {name: arrays[name].copy() for name in parts.names("local")}
        self._bits = _bits(self._local)

    @property
    def has_local(self) -> bool:
        """Whether clients have arrays of their own."""
        return bool(self._local)

    @property
    def num_local(self) -> int:
        """The length of a client's row."""
        return len(self._bits)

    def initial(self, num_clients: int, format: RowFormat) -> Any:
        """Before the first round; the empty mapping for models that have nothing beside."""
        if not self._shared and not self._local:
            return {}
        own: Rows = ()
        if self._local:
            own = format.zeros(num_clients, self.num_local)
        return Rest(self._shared, own)

    def require_sound(self, rest: Any) -> None:
        """Refuse shared arrays of a file that no client may send."""
        fault = self.parts.value_fault(rest.shared) if rest else None
        if fault is not None:
            raise not_sound(fault)

    def of_client(self, rest: Any, client: int) -> Arrays:
        """What a client trains with; of an empty ``rest`` the initial arrays."""
        if not rest:
            return {**self._shared, **self._local}
        if not self._local:
            return dict(rest.shared)
        return {**rest.shared, **self._arrays(rest.own[client])}

    def of_everyone(self, rest: Any, weight_m: FloatArray) -> Arrays:
        """The shared arrays, and the weighted mean of the clients' local ones."""
        if not rest or not self._local:
            # Without local arrays all clients have the same ones.
            return self.of_client(rest, 0)
        # Of yes and no there is no mean: a mask stays as it was.
        means = {
            name: WeightedMean(array)
            for name, array in self._local.items()
            if array.dtype != np.bool_
        }
        for weight, row_d in zip(weight_m / weight_m.sum(), rest.own, strict=True):
            # A row of zeros is the initial arrays, with which the mean begins.
            if np.asarray(row_d).view(np.uint32).any():
                arrays = self._arrays(row_d)
                for name, mean in means.items():
                    mean.add(weight, arrays[name])
        found = {name: mean.value() for name, mean in means.items()}
        return {**rest.shared, **self._local, **found}

    def closed(
        self,
        rest: Any,
        client_n: IntArray,
        received: Sequence[Arrays],
        coef_n: FloatArray,
        median: bool,
    ) -> Any:
        """After a round: ``received`` has the arrays of each reply that counts, with ``coef_n``."""
        if not rest:
            return rest
        shared = mean_rest(self.parts, rest.shared, list(received), coef_n, median)
        own = rest.own
        if self._local:
            rows = [_bits({name: arrays[name] for name in self._local}) for arrays in received]
            # A difference of floats would not give back all bits.
            changed = [(bits ^ self._bits).view(np.float32) for bits in rows]
            own = put_rows(own, client_n, changed)
        return Rest(shared, own)

    def _arrays(self, row_d: Array) -> Arrays:
        bits = (np.asarray(row_d).view(np.uint32) ^ self._bits).view(np.uint8)
        arrays = {}
        first = 0
        for name, array in self._local.items():
            # A copy begins where numbers of every type may begin.
            own = bits[first : first + array.nbytes].copy()
            arrays[name] = own.view(array.dtype).reshape(array.shape)
            # The initial array may hold infinities itself, as a mask of attention does.
            if np.any(np.isfinite(array) > np.isfinite(arrays[name])):
                raise not_sound(f"a client's {name} is not finite")
            first += array.nbytes
        return arrays


def _bits(arrays: Arrays) -> npt.NDArray[np.uint32]:
    """The bits of some arrays, padded to whole numbers of 32."""
    # Memories have rows of float32, whatever the types of the arrays are.
    content = b"".join(array.tobytes() for array in arrays.values())
    return np.frombuffer(content + bytes(-len(content) % 4), np.uint32)
