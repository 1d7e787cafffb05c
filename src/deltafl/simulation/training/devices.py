"""Where tensors are computed, and how exactly: devices by name, TF32 and bfloat16."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...errors import DeltaflError


def find_device(name: str) -> torch.device:
    """The device called ``cpu``, ``cuda``, ``cuda:N``, or ``auto``: CUDA where there is any, else the CPU.

    Raises:
        DeltaflError: If this machine, or this PyTorch, does not have it.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if count == 0:
        built = "finds no GPU" if torch.version.cuda else "is built without CUDA"
        raise DeltaflError(f"device is {name!r}, but PyTorch {torch.__version__} {built} here; write 'cpu' or 'auto'")
    index = device.index or 0
    if index >= count:
        raise DeltaflError(f"device is {name!r}, but there are {count} GPUs here; write 'cuda:{count - 1}' or less")
    return torch.device("cuda", index)


def device_name(device: torch.device) -> str:
    """The device for people and records: its name, and the product's if it is a GPU."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


@contextmanager
def numerics(device: torch.device, precision: str) -> Iterator[None]:
    """Float32 products as exact as ``precision`` says, and on a GPU kernels that give the same bits again.

    cuDNN runs convolutions in TF32 unless told not to, so ``float32`` has to be asked for.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    rounded = precision == "tf32"
    torch.set_float32_matmul_precision("high" if rounded else "highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=rounded):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Products of the forward pass in bfloat16 where the precision says so; parameters, losses and sums stay float32.

    Without a cache of cast parameters: they change in every step.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16", cache_enabled=False)
