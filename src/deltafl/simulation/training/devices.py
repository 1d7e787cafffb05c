"""Devices by name, and how products are computed on them."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ...errors import DeltaflError


def find_device(name: str) -> torch.device:
    """The device named ``cpu``, ``cuda``, ``cuda:N``, or ``auto``: CUDA if there is a GPU.

    ``cuda`` is the GPU that this process has taken (``torch.cuda.set_device``), else the first.
    """
    count = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and count == 0):
        return torch.device("cpu")
    known = re.fullmatch(r"auto|cuda(:(?P<number>[0-9]{1,3}))?", name)
    number = count
    if known is not None and known["number"]:
        number = int(known["number"])
    elif known is not None and count > 0:
        number = 0
        # ``current_device`` would start CUDA in a process that only looks.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            number = torch.cuda.current_device()
    if number >= count:
        raise DeltaflError(
            f"device is {name!r}, but PyTorch {torch.__version__} finds {count} GPUs; write 'auto'"
        )
    return torch.device("cuda", number)


def device_name(device: torch.device) -> str:
    """The device for people and records, with the product name of a GPU."""
    if device.type == "cpu":
        return "cpu"
    return f"{device} ({torch.cuda.get_device_name(device)})"


@contextmanager
def product_precision(device: torch.device, precision: str = "float32") -> Iterator[None]:
    """On a GPU: TF32, cuDNN's default, only if it is asked for, and kernels that repeat their
    bits.
    """
    if device.type != "cuda":
        yield
        return
    rough = precision == "tf32"
    backends: Any = torch.backends
    # As torch's own contexts do, for ``disable_global_flags`` forbids everybody else to set them.
    allowed = backends.__allow_nonbracketed_mutation()
    with allowed, _settings_restored() as operations, warnings.catch_warnings():
        torch.set_float32_matmul_precision("high" if rough else "highest")
        cudnn: Any = torch.backends.cudnn
        cudnn.allow_tf32 = rough
        # Without this some would still follow ``torch.backends.fp32_precision``.
        for operation in operations:
            operation.fp32_precision = "tf32" if rough else "ieee"
        cudnn.enabled = True
        cudnn.benchmark = False
        cudnn.deterministic = True
        # Parameters are parts of one vector, and cuDNN wants those of an LSTM in its own order: it
        # copies them.
        warnings.filterwarnings(
            "ignore",
            "RNN module weights are not part of single contiguous chunk",
        )
        yield


@contextmanager
def _settings_restored() -> Iterator[list[Any]]:
    """Afterwards torch's settings of products and convolutions are the user's; gives the operations
    that have a precision of their own, since torch 2.9.

    With these, torch raises an error where an older setting that disagrees is read.
    """
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn
    operations: list[Any] = []
    if hasattr(torch.backends, "fp32_precision"):
        operations = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul]
    names = [(cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")]
    names += [(operation, "fp32_precision") for operation in operations]
    before = []
    products = None
    for part, name in names:
        with suppress(RuntimeError):
            before.append((part, name, getattr(part, name)))
    with suppress(RuntimeError):
        products = torch.get_float32_matmul_precision()
    try:
        yield operations[:3]
    finally:
        if products is not None:
            torch.set_float32_matmul_precision(products)
        for part, name, value in before:
            setattr(part, name, value)
