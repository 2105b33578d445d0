"""The trainer's end of a weight sync if the trainer, or one rank of it, is in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from rlhf_host.backends.weights import in_buckets, named_weights
from rlhf_host.engines.loading import call_by_path
from rlhf_host.plugins.threads import Threads
from rlhf_host.protocols import Buckets


class LocalWeights:
    """One rank's weights.

    Args:
        weights: the backend's function; by default the weights are those of a plain module.
        everywhere: ``weights`` also takes ``everywhere``, as ``Backend.weights`` may.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Callable[..., Buckets] | None = None,
        *,
        rank: int = 0,
        size: int = 1,
        everywhere: bool = False,
    ):
        self.rank, self.size, self.everywhere = rank, size, everywhere or weights is None
        self.device = next(model.parameters()).device
        self.state: dict[str, Any] = {}
        self._weights = weights or (lambda bucket_bytes, **_: in_buckets(named_weights(model), bucket_bytes))

    def buckets(self, bucket_bytes: int, everywhere: bool = False) -> Buckets:
        return self._weights(bucket_bytes, everywhere=True) if everywhere else self._weights(bucket_bytes)


class LocalSource:
    """A trainer in this process."""

    def __init__(self, model: nn.Module, weights: Callable[..., Buckets] | None = None):
        self._weights = LocalWeights(model, weights)
        self._threads = Threads(4)

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        return [await asyncio.wrap_future(self._threads.submit(partial(call_by_path, function, self._weights, arguments)))]
