"""The two ends of a weight sync in one process, for tests: a trainer that has a module, engines that hold one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from torch import nn

from rlhf_host.engines.loading import ModuleLoader, call_by_path, copy_weights
from rlhf_host.errors import RunError
from rlhf_host.protocols import Buckets
from rlhf_host.records.episodes import Generation, SampleKey, Sampling
from rlhf_host.weight_sync.local_source import LocalSource


class ModuleSource(LocalSource):
    """What ``sync_weights`` gets as ``source``, with the module at hand, which a run does not give."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.model = model


def module_source(model: nn.Module) -> ModuleSource:
    """A trainer that has ``model``."""
    return ModuleSource(model)


class ModuleEngine:
    """An engine that only holds a model: the trainer's own, or a copy that code named by import path can load into."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.version = 0
        self._loader = ModuleLoader("engine", model, self._replace)

    async def run(self, function: str, **arguments: Any) -> Any:
        """``"package.module:function"(loader, **arguments)`` in a thread."""
        return await asyncio.to_thread(call_by_path, function, self._loader, arguments)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        raise RunError("this engine only holds weights")

    def set_version(self, version: int) -> None:
        self.version = version

    def expect(self, count: int) -> None:
        pass

    async def close(self) -> None:
        pass

    def _replace(self, buckets: Buckets, version: int) -> None:
        self.version = -1
        copy_weights(self.model, buckets)
        self.version = version
