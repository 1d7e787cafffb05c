"""Tasks on data sets that are published nowhere, registered in ``deltafl.tasks``; their owner brings the files.

Each data set is one NumPy archive, looked for as in ``deltafl.tasks.files``. What they hold, by the names of the arrays
(N examples; uint8 unless another type is given):

- ``unipen62_writers.npz``: ``x`` (N, 28, 28), ink 255 on 0; ``y`` (N,), labels 0 to 61 for 0-9, A-Z, a-z; ``writer``
  (N,), whole numbers. Handwriting from pen trajectories (Guyon et al., UNIPEN, ICPR 1994) in the classes of FEMNIST,
  for which it stands in; reports must not call it FEMNIST.
- ``cifar10_jpeg.npz``: CIFAR-10, recompressed as JPEG, hence not its pixels. ``header``, ``train_scan`` and
  ``train_offsets`` are 32 x 32 images as ``decode_packed`` describes, ``train_y`` (N,) their labels 0 to 9; the same
  with ``test_``.
- ``celeba_smiling_84.npz``: some of CelebA's faces. ``header``, ``scan`` and ``offsets`` are 84 x 84 images, ``y``
  (N,) is 1 for a smile and 0 for none, ``celeb`` (N,) the person, whole numbers.
- ``tinyshakespeare_roles.npz``: ``text`` (the bytes of all roles, end to end), ``offsets`` int64 (roles + 1,) where
  each starts, ``role`` their names. It is a small part of Shakespeare, and roles of one name in different plays are one
  role; so it is not LEAF's data set.
- ``mnist_writers.npz``: ``train_x``, ``train_y``, ``test_x``, ``test_y``, MNIST, and ``train_writer`` (60,000,), whole
  numbers. The task ``mnist`` reads it in place of MNIST's own files where it is found.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from deltafl import tasks

from .archives import (
    TINY_ALPHABET,
    load_celeba_subset,
    load_cifar10_jpeg,
    load_mnist_writers,
    load_tinyshakespeare,
    load_unipen62,
)

_KNOWN = tasks.known_tasks()
_mnist = _KNOWN["mnist"]


def load_mnist(data_dir: Path | None = None) -> tasks.Dataset:
    """MNIST with its writers where they are found, else as the package reads it."""
    assert _mnist.load is not None
    return load_mnist_writers(data_dir) or _mnist.load(data_dir)


for _spec in (
    replace(_mnist, summary="28 x 28 images of digits; by writer where mnist_writers.npz is found", load=load_mnist),
    replace(
        _KNOWN["femnist"],
        name="unipen62",
        summary="28 x 28 images of digits and letters, 62 classes, by writer; unipen62_writers.npz",
        num_clients=278,
        sample_size=56,
        load=load_unipen62,
        all_owners=False,
    ),
    replace(
        _KNOWN["cifar10"],
        name="cifar10-jpeg",
        summary="CIFAR-10 recompressed as JPEG, 32 x 32 in colour, cropped and flipped; cifar10_jpeg.npz",
        needs=("torch", "pillow", "archive"),
        load=load_cifar10_jpeg,
    ),
    # LEAF's learning rate, whose model differs. Measured, one seed: fedavg swings between the two classes for 12 rounds
    # with 0.1; with 20 clients a round and 0.003, 0.01 or 0.03 it is no better than one class after 20 rounds.
    # Minibatch SGD on the pooled data falls steadily with 0.003. Not settled.
    replace(
        _KNOWN["celeba"],
        name="celeba-subset",
        summary="84 x 84 faces of celebrities, smiling or not, by celebrity; celeba_smiling_84.npz",
        num_clients=278,
        sample_size=56,
        load=load_celeba_subset,
        all_owners=False,
    ),
    replace(
        _KNOWN["shakespeare"],
        name="tinyshakespeare",
        summary="a part of Shakespeare, the next character after 80, by role; tinyshakespeare_roles.npz",
        num_clients=141,
        sample_size=14,
        load=load_tinyshakespeare,
        make_model=partial(tasks.next_token_lstm, len(TINY_ALPHABET)),
        all_owners=False,
    ),
):
    tasks.register(_spec)
