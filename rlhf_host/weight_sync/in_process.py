"""Sync for engines that sample from the trainer's own module: only the version changes, no weights are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_host.errors import RunError
from rlhf_host.hookspecs import hookimpl
from rlhf_host.protocols import SyncTarget
from rlhf_host.records.needs import Needs


class InProcess:
    def __init__(self, options: Any):
        self.targets: list[SyncTarget] = []

    @hookimpl
    def needs(self) -> Needs:
        return Needs(in_place=True)

    @hookimpl
    def sync_connect(self, targets: Sequence[SyncTarget]) -> None:
        self.targets = list(targets)

    @hookimpl
    def sync_weights(self, source: Any, version: int) -> None:
        for target in self.targets:
            if not target.in_place:
                raise RunError(
                    f"engine {target.name} holds weights of its own: in_process cannot update it; choose another --sync"
                    " (ipc on one machine, broadcast between machines)"
                )
            target.engine.set_version(version)

    @hookimpl
    def sync_close(self) -> None:
        self.targets = []
