"""The choice of kernels by comparison with the model: what every package of kernels has as ``choose``."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_host.protocols import Kernels, KernelsPlugin

__all__ = ["choose"]


def choose(candidates: Sequence[tuple[str, KernelsPlugin]], plain: Kernels, *, faster: bool = False) -> Kernels:
    """Returns kernels as ``KernelsPlugin.choose`` does: each twin is compared with its model before it is used.

    Args:
        faster: twins to train are then measured too, and used only where they are faster than the model.
    """
    from rlhf_kernels.compared import ComparedKernels

    return ComparedKernels(candidates, plain, faster=faster)
