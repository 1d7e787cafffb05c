"""A cohort on a GPU model by model, several at once: what ``gpu.py`` tries as "branches".

The kernels for the convolutions of many models at once can be slower than those of the libraries
for one. Here each model's pass is on one of a few streams, which are branches of the graph of a
step. In a prototype on an H100, ResNet-18 took 430 steps a second in TF32 so, and 490 in bfloat16;
it is not the library's way because it has not been measured inside it.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from deltafl.simulation.training.dropout import masked_layers, wearing
from deltafl.simulation.training.tensors import trained_parameters

STREAMS = 8


def branched_forward(
    model: nn.Module,
    products: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Callable[..., Tensor]:
    """``vectorized.vectorized_forward``, in branches; frozen parameters are not known here.

    In bfloat16 images and the weights of convolutions have their channels last, as kernels want
    them. On a CPU one model follows the other.
    """
    del products  # convolutions are the libraries' own
    names = list(trained_parameters(model))
    layers = masked_layers(model)
    streams: list[torch.cuda.Stream] = []
    if torch.cuda.is_available():
        streams = [torch.cuda.Stream() for _ in range(STREAMS)]  # type: ignore[no-untyped-call]

    def ordered(part: Tensor) -> Tensor:
        if dtype is torch.bfloat16 and part.dim() == 4:
            return part.contiguous(memory_format=torch.channels_last)
        return part

    def forward(params: Sequence[Tensor], x: Tensor, *masks: Tensor) -> Tensor:
        outputs = []
        # Of unbound parameters the gradients are stacked once; of views each would be as large as
        # all of them.
        for place, own in enumerate(zip(*(part.unbind() for part in params), strict=True)):
            stream = streams[place % STREAMS] if streams else None
            if stream is not None and place < STREAMS:
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream) if stream else nullcontext():
                arrays = dict(zip(names, map(ordered, own), strict=True))
                with wearing(layers, [mask[place] for mask in masks]):
                    outputs.append(torch.func.functional_call(model, arrays, (ordered(x[place]),)))
        for stream in streams[: len(outputs)]:
            torch.cuda.current_stream().wait_stream(stream)
        # Classes before examples, which is the order of torch's losses.
        return torch.stack(outputs).movedim(1, -1)

    return forward
