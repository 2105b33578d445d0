"""Sync for engines that sample from the trainer's own module: only the version changes, no weights are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_host.errors import RunError
from rlhf_host.protocols import SyncTarget, WeightSource, WeightSync, WeightSyncStart, WeightSyncTraits


class InProcess:
    traits = WeightSyncTraits(in_place=True)

    def __init__(self, options: Any):
        self.targets: list[SyncTarget] = []

    def start(self, start: WeightSyncStart) -> WeightSync:
        return self

    async def connect(self, targets: Sequence[SyncTarget]) -> None:
        self.targets = list(targets)

    async def send(self, source: WeightSource, version: int) -> None:
        for target in self.targets:
            if not target.in_place:
                raise RunError(
                    f"engine {target.name} holds weights of its own: in_process cannot update it; choose another --sync"
                    " (ipc on one machine, broadcast between machines)"
                )
            target.engine.set_version(version)

    async def close(self) -> None:
        self.targets = []
