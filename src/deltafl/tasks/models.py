"""The models, losses and augmentation of the tasks. PyTorch is imported when a model is made, not
before.

All of them raise ``MissingExtraError`` without PyTorch.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from ..errors import DeltaflError
from ..model.parts import TRAINABLE, Patterns, patterns_of
from ..types import Rng
from .losses import Module, Tensor

#: Pixels of zeros around an image before it is cropped back to its size.
PAD = 4


def softmax_regression(in_features: int, classes: int) -> Module:
    """Multinomial logistic regression: one linear layer on the flattened input."""
    return mlp(in_features, (), classes)


def one_output(model: Callable[[int, int], Module], in_features: int) -> Module:
    """``model(in_features, 1)`` with outputs (B,) for regression, as targets are."""
    from .modules import nn

    return nn.Sequential(model(in_features, 1), nn.Flatten(0))


def is_one_output(make_model: object) -> bool:
    """Whether it makes a model of ``one_output``."""
    return getattr(make_model, "func", None) is one_output


def within_one_output(names: Patterns) -> Patterns:
    """Name patterns of the arrays of a model, as those of ``one_output`` of it."""
    if isinstance(names, str) and names in TRAINABLE:
        return names
    return tuple(f"0.{name}" for name in patterns_of(names))


def without_one_output(sentence: str, make_model: object) -> str:
    """What is said of the arrays of ``one_output`` of a model, with their own names."""
    if not is_one_output(make_model):
        return sentence
    return re.sub(r"(?<=')0\.(?=[^\s'])", "", sentence)


def mlp(in_features: int, hidden: Sequence[int], classes: int) -> Module:
    """A chain of linear layers of widths ``hidden`` with ReLU between them; none is softmax
    regression.
    """
    from .modules import nn

    widths = [in_features, *hidden]
    layers: list[Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def two_layer_cnn(
    channels: tuple[int, int] = (16, 32),
    in_channels: int = 1,
    side: int = 28,
    classes: int = 10,
) -> Module:
    """Two blocks of convolution 5 x 5 without padding, max-pooling by 2 and ReLU; then one linear
    layer.

    For images of ``side`` x ``side`` >= 16 pixels; the default has 18,378 parameters.

    Raises:
        DeltaflError: If the image is too small.
    """
    if side < 16:
        raise DeltaflError(
            f"two_layer_cnn needs images of 16 x 16 pixels or more, got {side} x {side}: use mlp"
        )
    from .modules import nn

    # In each block the convolution takes 4 pixels and the pool half of the rest.
    side_out = ((side - 4) // 2 - 4) // 2
    blocks = _blocks((in_channels, *channels), kernel=5, padding=0)
    return nn.Sequential(
        *blocks,
        nn.Flatten(),
        nn.Linear(channels[1] * side_out**2, classes),
    )


def femnist_cnn(classes: int = 62) -> Module:
    """For handwriting of 28 x 28 pixels: three blocks of convolution 3 x 3, max-pooling by 2 and
    ReLU; two linear layers.

    The convolutions have 32, 64 and 64 filters and padding 1, the linear layers 576-128-classes
    with ReLU between; 137,598 parameters with 62 classes.
    """
    from .modules import nn

    blocks = _blocks((1, 32, 64, 64), kernel=3, padding=1)
    # Three pools leave 3 of 28 pixels a side.
    return nn.Sequential(
        *blocks,
        nn.Flatten(),
        nn.Linear(64 * 3 * 3, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def celeba_cnn(classes: int = 2, side: int = 84) -> Module:
    """For faces of 84 x 84 pixels: four blocks of convolution 3 x 3, GroupNorm, max-pooling by 2
    and ReLU; one linear layer.

    The convolutions have 32 filters and padding 1, GroupNorm 8 groups of 4, the linear layer is
    800-classes; 30,498 parameters with 2 classes. Of another ``side``, 16 pixels or more, the
    linear layer has 32 (side // 16)^2 inputs. LEAF's model has batch normalization, whose
    statistics clients would have to share.
    """
    from .modules import nn

    blocks = _blocks((3, 32, 32, 32, 32), kernel=3, padding=1, groups=8)
    return nn.Sequential(
        *blocks,
        nn.Flatten(),
        nn.Linear(32 * (side // 16) ** 2, classes),
    )


def _blocks(
    channels: Sequence[int],
    kernel: int,
    padding: int,
    groups: int | None = None,
) -> list[Module]:
    """Layers of blocks: convolution, GroupNorm if there are groups, max-pooling by 2 and ReLU."""
    from .modules import nn

    layers: list[Module] = []
    for before, after in pairwise(channels):
        layers.append(nn.Conv2d(before, after, kernel, padding=padding))
        if groups is not None:
            layers.append(nn.GroupNorm(groups, after))
        # The pool stands before the ReLU: the two commute, and the ReLU has a quarter of the work.
        layers += [nn.MaxPool2d(2), nn.ReLU()]
    return layers


def resnet(
    classes: int = 10,
    widths: Sequence[int] = (64, 128, 256, 512),
    blocks: int = 2,
    groups: int = 32,
) -> Module:
    """A residual network for small colour images, from random weights; the default is ResNet-18.

    That has 11,173,962 parameters with 10 classes; one block in each of the ``widths`` 16, 32, 64
    is ResNet-8 with 78,042. The first convolution is 3 x 3 and no pool follows it, as is customary
    for 32 x 32 pixels; each width but the first halves the image. GroupNorm, whose number of
    ``groups`` divides the widths, stands for batch normalization, whose statistics clients would
    have to share.

    Raises:
        DeltaflError: If ``groups`` does not divide a width.

    Source: He et al., CVPR 2016; Wu and He, ECCV 2018 (32 groups).
    """
    if groups < 1 or any(width % groups for width in widths):
        raise DeltaflError(
            f"resnet has layers of {', '.join(map(str, widths))} channels, which {groups} does not "
            "divide"
        )
    from .modules import ResidualBlock, nn

    # A bias would be taken away by the normalization that follows.
    layers: list[Module] = [nn.Conv2d(3, widths[0], 3, padding=1, bias=False)]
    layers += [nn.GroupNorm(groups, widths[0]), nn.ReLU()]
    before = widths[0]
    # The first width keeps the size of the image.
    stride = 1
    for width in widths:
        layers.append(ResidualBlock(before, width, stride, groups))
        layers += [ResidualBlock(width, width, 1, groups) for _ in range(blocks - 1)]
        before = width
        stride = 2
    return nn.Sequential(
        *layers,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[-1], classes),
    )


def next_token_lstm(tokens: int, embedding: int = 8, hidden: int = 128) -> Module:
    """For text: which of ``tokens`` follows, by an embedding, an LSTM with one layer of ``hidden``
    cells, one linear.

    8 t + 4 * 128 (8 + 128 + 2) + 129 t parameters with the default widths and t tokens: 79,561 for
    65, 81,616 for 80. LEAF's model has two layers of 256 cells, ten times as many parameters.
    """
    from .modules import NextToken

    return NextToken(tokens, embedding, hidden)


def crop_and_flip(x: Tensor, rng: Rng) -> Tensor:
    """Shift each image by up to ``PAD`` pixels along both axes, zeros coming in, and mirror half of
    them.

    All shifts are equally likely. ``rng`` draws three numbers an image, one image after the other,
    so that cutting a batch in two changes nothing. Maps (B, channels, height, width) to new images
    of the same shape and type.

    Source: He et al., "Deep residual learning", CVPR 2016, section 4.2.
    """
    from .modules import torch

    size, _, height, width = x.shape
    # Two shifts and a flip for each image.
    draw_bk = rng.random((size, 3))
    place_b2 = np.floor(draw_bk[:, :2] * (2 * PAD + 1))
    shift_b2 = torch.from_numpy(place_b2.astype(np.int64))
    row_bh = shift_b2[:, :1] + torch.arange(height)
    column_bw = shift_b2[:, 1:] + torch.arange(width)
    flipped_b1 = torch.from_numpy(draw_bk[:, 2:] < 0.5)
    column_bw = torch.where(flipped_b1, column_bw.flip(1), column_bw)
    padded = torch.nn.functional.pad(x, (PAD, PAD, PAD, PAD))
    image_b = torch.arange(size)[:, None, None]
    cropped: torch.Tensor = padded[image_b, :, row_bh[:, :, None], column_bw[:, None, :]]
    # Indices on both sides of the channels have put these last.
    return cropped.permute(0, 3, 1, 2).contiguous()
