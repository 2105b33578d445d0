"""The trainer's end of a weight sync where the trainer, or one rank of it, is in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from rlhf_host.backends.weights import in_buckets, named_weights
from rlhf_host.engines.loading import Buckets, call_by_path
from rlhf_host.plugins.threads import Threads


class LocalWeights:
    """One rank's weights; ``gathered`` is the backend's, or a plain module's own."""

    def __init__(self, model: nn.Module, gathered: Callable[[int], Buckets] | None = None, *, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size
        self.device = next(model.parameters()).device
        self.state: dict[str, Any] = {}
        self._gathered = gathered or (lambda bucket_bytes: in_buckets(named_weights(model), bucket_bytes))

    def buckets(self, bucket_bytes: int) -> Buckets:
        return self._gathered(bucket_bytes)


class LocalSource:
    """A trainer in this process."""

    def __init__(self, model: nn.Module, gathered: Callable[[int], Buckets] | None = None):
        self.model: nn.Module | None = model
        self._weights = LocalWeights(model, gathered)
        self._threads = Threads(4)

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        return [await asyncio.wrap_future(self._threads.submit(partial(call_by_path, function, self._weights, arguments)))]
