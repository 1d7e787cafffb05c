"""A step of a cohort on a GPU, captured as CUDA graphs.

Python needs longer to launch the kernels of a small model's step than the GPU to run them. A graph
launches the same kernels in one call.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ...errors import log

#: Eager calls before a capture, in which libraries choose their algorithms; also, a number of
#: models that comes up less often is not worth a capture.
WARM_UPS = 3
#: Of one step: each graph has its kernels' arguments in memory. What is beyond stays eager.
MOST_GRAPHS = 64

#: Launches the captured call again, and the tensor that each launch fills.
Replay = tuple[Callable[[], None], Tensor]


class CapturedStep:
    """Calls a step of the first a <= n models of a cohort, and from the fourth call on replays it.

    Every call works in the same memory, so a step may keep state in tensors that it closes over;
    numbers that it closes over are those of the capture. Where a capture fails all calls stay
    eager, with the same results.

    Args:
        step: Of inputs (a, ...), each the first rows of a buffer; its result is valid until the
            next call.
        inputs: As large as they get, (n, ...); only shapes and types count.
        capture: Captures a call without running it; ``CudaCapture`` of the device.
    """

    def __init__(
        self,
        step: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        capture: Callable[[Callable[[], Tensor]], Replay],
    ) -> None:
        self._step = step
        self._buffers = [torch.empty_like(part) for part in inputs]
        self._capture = capture
        self._calls = Counter[int]()
        self._replays: dict[int, Replay] = {}
        self.failed = False

    @property
    def captured(self) -> bool:
        """Whether calls are replayed so far."""
        return len(self._replays) > 0

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The step's result."""
        number = len(inputs[0])
        own = [buffer[:number] for buffer in self._buffers]
        # A graph reads where it read at its capture, so inputs are brought there.
        for buffer, part in zip(own, inputs, strict=True):
            buffer.copy_(part)
        call = partial(self._step, *own)
        if number not in self._replays:
            self._calls[number] += 1
            full = len(self._replays) == MOST_GRAPHS
            if self.failed or full or self._calls[number] <= WARM_UPS:
                return call()
            try:
                self._replays[number] = self._capture(call)
            except RuntimeError as error:
                log.info("steps of a cohort are launched one by one: %s", error)
                self.failed = True
                # Some versions of torch refuse to replay what was captured before.
                self._replays.clear()
                return call()
        # A capture runs nothing, so the call that was captured is replayed, too.
        replay, result = self._replays[number]
        replay()
        return result


class CudaCapture:
    """Captures calls on a GPU. Its graphs share their memory, as they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # Graphs share memory only if they were captured on the same stream.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, call: Callable[[], Tensor]) -> Replay:
        """The graph's replay and the tensor that it fills; a RuntimeError if CUDA refuses."""
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self._device.index or 0]
        state = generator.clone_state()
        with torch.cuda.device(self._device), _without_collector():
            before = torch.cuda.current_stream()
            try:
                with torch.cuda.graph(graph, self._pool, self._stream):
                    result = call()
            except RuntimeError:
                # Torch leaves it as in a capture: nothing could be drawn from it any more.
                generator.graphsafe_set_state(state)
                raise
            finally:
                # After a failed capture torch stays on the stream of the capture.
                torch.cuda.set_stream(before)
        return graph.replay, result


@contextmanager
def _without_collector() -> Iterator[None]:
    """Within it nothing is collected as garbage: an older graph would end the capture."""
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
