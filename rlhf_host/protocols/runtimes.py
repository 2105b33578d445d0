"""Runtimes: where roles and engines live. ``rlhf_host.runtimes.building`` builds them in whatever process a runtime chooses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlhf_host.protocols.common import Traits
from rlhf_host.protocols.engines import Generator
from rlhf_host.protocols.syncs import Bring, SyncTarget, WeightSource
from rlhf_host.records.needs import Needs
from rlhf_host.records.tensors import Batch, TopK

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_host.config.schema import RoleConfig, TrainConfig
    from rlhf_host.plugins.manager import PluginManager
    from rlhf_host.plugins.specs import PluginSpec
    from rlhf_host.training.reduction import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeTraits(Traits):
    remote: bool = False
    """Roles and engines live in other processes."""
    places: bool = False
    """It takes ``placement``."""
    sync: str = "ipc"
    """The weight sync to use where nobody chose one and engines have weights of their own."""
    sync_in_place: str = "in_process"
    """The same where the engine samples from the trainer's own module."""


@dataclass(slots=True)
class Update:
    """One optimizer batch's outcome; ``refused`` says why a role's step did not happen."""

    metrics: Metrics
    refused: str | None = None


class Trainer(Protocol):
    """A worker, or a group of them that acts as one. Called by the controller; returns when it is done."""

    @property
    def compute_s(self) -> float:
        """Seconds spent in forward, backward and optimizer steps so far."""

    def outputs(self, role: str, what: Literal["logprobs", "values", "scores"], batch: Batch) -> Tensor:
        """Without gradient, in training's layout and precision: ``[B, T]`` (``scores``: ``[B]``) float32 on the CPU."""

    def topk(self, role: str, k: int, batch: Batch) -> TopK:
        """The role's ``k`` likeliest tokens at every completion token, on the CPU; otherwise as ``outputs``."""

    def update(self, batch: Batch, *, sampled_now: bool) -> Update:
        """One optimizer batch. ``sampled_now``: the weights are still those that sampled it."""

    def adjust(self, role: str, *, lr: float) -> None:
        """Another peak learning rate for a trained role, from the next update on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeStart:
    """Given to ``RuntimePlugin.start``. Engines, backends and kernels are made by ``spec.build()``, here or in another process."""

    roles: Mapping[str, RoleConfig]
    """Settings of each role of ``needs``, in its order."""
    needs: Needs
    engine: PluginSpec
    backend: PluginSpec
    kernels: tuple[PluginSpec, ...]
    hooks: PluginManager
    bring: Bring
    train: TrainConfig
    tokenizer: Any
    total_updates: int
    """0: nothing is trained."""
    placement: tuple[str, ...]
    debug: bool


class Runtime(Protocol):
    """``sync`` and ``close`` are called on the run's event loop and must not block it, the rest by the controller."""

    @property
    def trainer(self) -> Trainer:
        """Of all roles."""

    @property
    def engine(self) -> Generator:
        """What episodes ask."""

    @property
    def source(self) -> WeightSource:
        """The actor's weights."""

    @property
    def targets(self) -> Sequence[SyncTarget]:
        """The engines that are up."""

    @property
    def context_lengths(self) -> Mapping[str, int]:
        """Longest row of each role, in tokens."""

    @property
    def exact(self) -> bool:
        """Roles and engines all compute in 32 bits."""

    async def sync(self, version: int) -> None:
        """``await bring(targets, source, version)`` with nothing else at the weights; again where an engine died in it."""

    def save_role(self, name: str, directory: Path) -> None:
        """In Hugging Face format, with the tokenizer."""

    def save_state(self, directory: Path) -> None:
        """Optimizers and schedules of the trained roles, into an existing directory, a folder for each role."""

    def load_state(self, directory: Path) -> None:
        """Take them back."""

    async def close(self) -> None:
        """However far ``start`` came, any number of times; leaves no process."""


class RuntimePlugin(Protocol):
    """An entry point of the group ``rlhf.runtimes``."""

    @property
    def traits(self) -> RuntimeTraits:
        """May depend on the options."""

    def describe(self, start: RuntimeStart) -> Iterable[str]:
        """Lines for ``--dry-run``. Raises ``UserError`` for a placement that cannot be."""

    def start(self, start: RuntimeStart) -> Runtime:
        """The runtime, once models are loaded and engines are up. ``UserError`` and ``RunError`` leave nothing running."""
