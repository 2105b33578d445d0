"""Memory that this process has used."""

from __future__ import annotations

import resource
import sys

import torch

from rlhf_host.models.available_memory import cuda_peak


def memory() -> dict[str, float]:
    """Returns the peak resident memory of this process in GB, and of CUDA if it is used."""
    used = {"memory/rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        used["memory/cuda_gb"] = cuda_peak() / 1e9
    return used
