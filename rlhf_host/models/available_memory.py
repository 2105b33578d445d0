"""Memory available for models: of this machine and its container, or of a device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with the limit of a container's memory, in the two versions of control groups."""


def machine_memory() -> dict[str, int]:
    """Returns bytes by the names of ``/proc/meminfo``; at least ``MemTotal`` if the machine tells anything."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return {line.partition(":")[0]: 1024 * int(line.split()[1]) for line in lines}
    except (OSError, ValueError, IndexError):
        try:
            return {"MemTotal": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
        except (AttributeError, ValueError, OSError):
            return {}


def container_memory() -> int | None:
    """Returns the bytes of memory that this container may use; None: no limit is known."""
    for limit in LIMITS:
        try:
            return int(limit.read_text(encoding="ascii"))
        except (OSError, ValueError):  # "max"
            continue
    return None


def available_memory(device: Any) -> int | None:
    """Returns the bytes that a ``torch.device`` of this machine has in total, swap included; None: unknown."""
    if device.type == "cpu" and "MemTotal" in (sizes := machine_memory()):
        allowed = container_memory()
        return min(sizes["MemTotal"], sizes["MemTotal"] if allowed is None else allowed) + sizes.get("SwapTotal", 0)
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    return None


_forgotten = [0]
"""The peak of CUDA before it was last forgotten."""


def forget_peak(device: Any) -> int:
    """Lets CUDA measure its peak from now on; returns the bytes that are there."""
    import torch

    _forgotten[0] = max(_forgotten[0], torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def cuda_peak() -> int:
    """Returns the most bytes of tensors that were on CUDA at once."""
    import torch

    return max(_forgotten[0], torch.cuda.max_memory_allocated())
