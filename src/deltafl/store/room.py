"""How much memory is left: what a file says it unpacks to is looked at before it is unpacked; and
how much of the processor a container has.
"""

import sys
from math import ceil
from pathlib import Path

if sys.platform != "win32":
    import resource

#: What a container may use, as Docker and Kubernetes say it.
_CONTAINER = Path("/sys/fs/cgroup")


def free_ram() -> int | None:
    """Bytes of RAM that can be had without swapping, and that this process may have; None where
    the system has no answer.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return None
    found = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        found.append(max(0, limit - pages * resource.getpagesize()))
    left = _left_in_container()
    if left is not None:
        found.append(left)
    return min(found, default=None)


def _left_in_container() -> int | None:
    """Bytes below a container's limit, beyond which the system would kill it; None without one."""
    try:
        most = int((_CONTAINER / "memory.max").read_text(encoding="ascii"))
        used = int((_CONTAINER / "memory.current").read_text(encoding="ascii"))
        lines = (_CONTAINER / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):  # a limit may be "max"
        return None
    # Copies of files that the system drops where memory is short.
    spare = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    return max(0, most - used + spare)


def cores_of_quota() -> int | None:
    """So many cores as a container's quota of processor time keeps busy; None without a quota."""
    try:
        # Microseconds of work in each period, on all cores together.
        quota, period = map(int, (_CONTAINER / "cpu.max").read_text(encoding="ascii").split())
    except (OSError, ValueError):  # its first word may be "max"
        return None
    return ceil(quota / period)


def require_ram(size: int) -> None:
    """Raise a ``MemoryError`` if so many bytes do not fit into free memory.

    A file of a few kilobytes may say that it unpacks to a terabyte.
    """
    free = free_ram()
    if free is not None and size > free:
        raise MemoryError(f"it takes {human(size)}, and {human(free)} of memory are free")


def human(number: int) -> str:
    """Bytes as a person writes them: 1.2 GB."""
    value = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        # Three digits are written, so that 999.5 would be 1000.
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value = value / 1000
    return f"{value:.3g} TB"
