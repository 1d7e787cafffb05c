"""Dropout in a cohort: masks that each client's own generator draws.

``nn.Dropout`` draws from one generator for whoever comes next. In a batch of clients the numbers of
one would then hang on the others. Here the layers multiply by masks that are drawn before the step:
a client has the same ones in any cohort, and steps can be replayed as graphs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from ...model.arrays import copied
from ...tasks.draws import seeded
from .tensors import has_hooks

#: Layers that keep or drop a whole channel of an example, over an image or over time.
_BY_CHANNEL = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class Masked(nn.Module):
    """In place of a layer that drops each number with probability p: keeps what a mask says, times
    1 / (1 - p).

    Args:
        p: In (0, 1].
        shape: Of the mask of one example.
    """

    def __init__(self, p: float, shape: torch.Size) -> None:
        super().__init__()
        self.p = p
        self.shape = shape
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The numbers that are kept; all of them as long as there is no mask."""
        if self.mask is None:
            return x
        # All are dropped at p = 1.
        scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        # Not a mask of such numbers, which bfloat16 would round.
        return x * scale * self.mask


def with_masks(model: nn.Module, example: Tensor) -> nn.Module:
    """A copy in which dropout layers take masks, or the model itself where there is none, or one
    that a pass does not call exactly once, and for each example: then they draw as they do.
    """
    kinds = (nn.Dropout, *_BY_CHANNEL)
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) in kinds and layer.p > 0 and layer.training and not has_hooks(layer)
    }
    if not layers:
        return model
    trial = copied(model)
    #: of what each layer is given, in each of its calls
    shapes: dict[str, list[torch.Size]] = {name: [] for name in layers}
    for name, found in shapes.items():
        trial.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs, found=found: found.append(inputs[0].shape),
        )
    # The generators, that of a GPU as well, are afterwards where they were.
    with torch.no_grad(), seeded(np.random.default_rng(0), example.device):
        trial(torch.cat([example, example]))
    # What all examples share, as a learned position, has one mask for all.
    if any([shape[:1] for shape in found] != [(2,)] for found in shapes.values()):
        return model
    masked: nn.Module = copied(model)
    for name, layer in layers.items():
        shape = shapes[name][0][1:]
        if isinstance(layer, _BY_CHANNEL):
            shape = torch.Size([*shape[:1], *[1] * len(shape[1:])])
        masked.set_submodule(name, Masked(float(layer.p), shape))
    return masked


def masked_layers(model: nn.Module) -> list[Masked]:
    """The layers that take masks, in the model's order."""
    return [layer for layer in model.modules() if isinstance(layer, Masked)]


@contextmanager
def wearing(layers: Sequence[Masked], masks: Sequence[Tensor]) -> Iterator[None]:
    """Within it the layers have these masks."""
    for layer, mask in zip(layers, masks, strict=False):
        layer.mask = mask
    try:
        yield
    finally:
        for layer in layers:
            layer.mask = None


class Masks:
    """Draws the masks of a cohort, step by step: each client's from a generator of its own.

    Args:
        layers: For which they are.
        seeds: One a client.
        width: Examples in a minibatch, padding included, so that nothing depends on the cohort.
        device: On which they are drawn: GPUs have other numbers than CPUs.
    """

    def __init__(
        self,
        layers: Sequence[Masked],
        seeds: Sequence[int],
        width: int,
        device: torch.device,
    ) -> None:
        self._layers = layers
        self._width = width
        self._device = device
        self._generators = []
        for seed in seeds if layers else ():
            self._generators.append(torch.Generator(device).manual_seed(seed))

    def draw(self, active: int) -> tuple[Tensor, ...]:
        """Those of the next step of the first clients: bool (active, width, ...) for each layer."""
        drawn = []
        for layer in self._layers:
            shape = (active, self._width, *layer.shape)
            mask = torch.empty(shape, dtype=torch.bool, device=self._device)
            for own, generator in zip(mask, self._generators, strict=False):
                own.bernoulli_(1 - layer.p, generator=generator)
            drawn.append(mask)
        return tuple(drawn)
