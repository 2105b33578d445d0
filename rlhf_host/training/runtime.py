"""What the loops ask of a runtime: models to train, an engine to sample from, wherever they live."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rlhf_host.config.schema import RunConfig
from rlhf_host.engines.protocol import Engine
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.protocols import SyncTarget
from rlhf_host.records.needs import Needs, RoleHandle
from rlhf_host.records.tensors import Experience
from rlhf_host.training.worker import Update
from rlhf_host.weight_sync.access import Source


class Trainer(Protocol):
    """A worker, or a group of them that acts as one."""

    compute_s: float

    def logprobs(self, role: str, experience: Experience) -> Tensor: ...

    def values(self, role: str, experience: Experience) -> Tensor: ...

    def scores(self, role: str, experience: Experience) -> Tensor: ...

    def update(self, batch: Experience, *, first: bool = True) -> Update: ...


class Runtime(Protocol):
    """Started once per run; ``models`` overrides where a role's weights come from (a checkpoint)."""

    trainer: Trainer
    engine: Engine
    handles: Mapping[str, RoleHandle]
    targets: list[SyncTarget]
    source: Source
    """What ``sync_weights`` reads the actor's weights from."""
    context_length: int

    def start(
        self,
        *,
        config: RunConfig,
        manager: PluginManager,
        needs: Needs,
        tokenizer: Any,
        total_updates: int,
        models: Mapping[str, Path],
    ) -> None: ...

    def compute_with(self, execute: Callable[[Callable[[], None]], None]) -> None:
        """``execute(work)`` runs work on the controller's thread while that waits, for runtimes that compute in this process."""
        ...

    async def sync(self, version: int) -> None:
        """Have the run's ``sync_weights`` bring the actor's weights to the engines as ``version``."""
        ...

    @property
    def trainable(self) -> list[str]: ...

    def save_role(self, name: str, directory: Path) -> None: ...

    def save_state(self, directory: Path) -> None:
        """Optimizers and schedules of the trainable roles, into an existing directory."""
        ...

    def load_state(self, directory: Path) -> None: ...

    async def close(self) -> None: ...
