"""Random variations of images for local training: ``Task.augment``. PyTorch is imported when one is made."""

from typing import TYPE_CHECKING

import numpy as np

from .models import require_torch

if TYPE_CHECKING:
    from torch import Tensor

#: Pixels of zeros around an image before it is cropped back to its size.
PAD = 4


def crop_and_flip(x: "Tensor", rng: np.random.Generator) -> "Tensor":
    """Shift each image by up to ``PAD`` pixels along both axes, zeros coming in, and mirror half of them.

    The usual training-time variation of CIFAR images: zeros around the image, a random crop of the old size, a flip of
    left and right with probability 1/2; all shifts are equally likely.

    Args:
        x: (B, channels, height, width), any type.
        rng: Draws three numbers an image, one image after the other, so that cutting a batch in two changes nothing.

    Returns:
        New images of the same shape and type.

    Source: He et al., "Deep residual learning", CVPR 2016, section 4.2.
    """
    torch = require_torch()
    size, _, height, width = x.shape
    draw_bk = rng.random((size, 3))
    shift_b2 = torch.from_numpy(np.floor(draw_bk[:, :2] * (2 * PAD + 1)).astype(np.int64))
    row_bh = shift_b2[:, :1] + torch.arange(height)
    column_bw = shift_b2[:, 1:] + torch.arange(width)
    flipped_b1 = torch.from_numpy(draw_bk[:, 2:] < 0.5)
    column_bw = torch.where(flipped_b1, column_bw.flip(1), column_bw)
    padded = torch.nn.functional.pad(x, (PAD, PAD, PAD, PAD))
    # Indices on both sides of the channels put these last.
    image_b = torch.arange(size)[:, None, None]
    cropped: Tensor = padded[image_b, :, row_bh[:, :, None], column_bw[:, None, :]].permute(0, 3, 1, 2)
    return cropped.contiguous()
