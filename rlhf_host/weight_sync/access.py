"""The two ends of a weight sync: functions run beside the trainer's and the engines' weights, wherever those are, by import path.

The engines' end is ``rlhf_host.engines.loading.Loader``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class Source(Protocol):
    """The trainer as sync plugins see it: ``runtime.source``."""

    model: nn.Module | None
    """The actor's module where it lives in this process, else ``None``."""

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        """``"package.module:function"(weights, **arguments)`` on every rank of the actor's group at once, in a thread where that
        matters; results in rank order. Arguments and results are plain values."""
        ...


class Weights(Protocol):
    """First argument of a function that ``source.run`` calls."""

    rank: int
    size: int
    device: torch.device
    state: dict[str, Any]
    """Whatever such functions keep from call to call."""

    def buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """All weights under every name of the state dict, a tied head's too, in about ``bucket_bytes`` at a time.

        Collective: every rank iterates to the end. Rank 0 gets the data; what others get is not looked at. The order, names and
        shapes are the same every time.
        """
        ...
