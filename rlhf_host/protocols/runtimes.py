"""Interface of runtimes, which decide in which processes roles and engines run. ``rlhf_host.runtimes.building`` builds roles in
this process, and ``rlhf_host.distributed`` roles and engines in any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rlhf_host.protocols.common import Traits, Writer
from rlhf_host.protocols.engines import Generator
from rlhf_host.protocols.syncs import Bring, SyncTarget, WeightSource
from rlhf_host.records.needs import Needs
from rlhf_host.records.tensors import Batch, RoleOutput, TopK

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_host.config.schema import RoleConfig, TrainConfig
    from rlhf_host.plugins.manager import PluginManager
    from rlhf_host.plugins.specs import PluginSpec
    from rlhf_host.training.reduction import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeTraits(Traits):
    remote: bool = False
    """True if roles and engines are in other processes."""
    places: bool = False
    """True if it accepts ``--placement``."""
    sync: str = "ipc"
    """The default weight sync, for engines with their own weights."""
    sync_in_place: str = "in_process"
    """The default weight sync, for an engine that samples from the trainer's own module."""
    generates: bool = False
    """True if it has ``engines`` for frozen roles that generate."""


@dataclass(slots=True)
class Update:
    """The result of one optimizer batch. ``refused`` tells why a role's step was not made."""

    metrics: Metrics
    refused: str | None = None
    flops: float = 0.0
    """Operations of the models for the passes forward and backward."""
    devices: int = 0
    """Number of devices on which these ran; 0: not counted."""
    peak_flops: float = 0.0
    """Peak operations per second of the slowest device; 0: unknown."""


class Trainer(Protocol):
    """A worker, or a group of workers that acts as one. The controller calls it, and calls return when the work is done."""

    @property
    def compute_s(self) -> float:
        """Seconds spent in forward, backward and optimizer steps so far."""

    def outputs(self, role: str, what: RoleOutput, batch: Batch) -> Tensor:
        """Compute without gradient, in training's layout and precision: ``[B, T]`` float32 on the CPU (``scores``, ``bootstrap``:
        ``[B]``)."""

    def topk(self, role: str, k: int, batch: Batch) -> TopK:
        """Return the role's ``k`` likeliest tokens at every completion token, on the CPU; otherwise as ``outputs``."""

    def update(self, batch: Batch, *, sampled_now: bool) -> Update:
        """Train on one optimizer batch. ``sampled_now``: the weights are still those that sampled it."""

    def forward_backward(self, batch: Batch, *, sampled_now: bool, last: bool, plugins: Sequence[PluginSpec] = ()) -> Update:
        """Add the gradients of a batch to those that wait for ``optim_step``; see ``Worker.forward_backward``."""

    def optim_step(self) -> Update:
        """Take the step that they wait for."""

    def gradients(self, patterns: Sequence[str]) -> dict[str, Tensor]:
        """Return the actor's gradients that wait, of weights whose names a pattern matches, and drop all that wait."""

    def evaluate(self, batch: Batch) -> Metrics:
        """Return the losses and metrics of a batch by the present actor, without a step; see ``Worker.evaluate``."""

    def adjust(self, role: str, *, lr: float) -> None:
        """Set the peak learning rate of a trained role, from the next update on."""

    def follow(self, role: str) -> None:
        """Move the weights of a frozen role towards those of its source, as ``RoleNeed.follows`` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeStart:
    """The argument of ``RuntimePlugin.start``. ``spec.build()`` creates engines, backends and kernels in any process."""

    roles: Mapping[str, RoleConfig]
    """Settings of each role of ``needs``, in the same order."""
    needs: Needs
    """Needs of all plugins together."""
    engine: PluginSpec | None
    """Engine; None: nothing is sampled."""
    backend: PluginSpec
    kernels: tuple[PluginSpec, ...]
    hooks: PluginManager
    """The run's plugins."""
    bring: Bring
    """``await bring(targets, source, version)`` brings the actor's weights to engines and checks that they arrived."""
    train: TrainConfig
    """The section ``train`` of the configuration."""
    tokenizer: Any
    """Tokenizer of the actor, saved with it."""
    total_updates: int
    """Number of optimizer updates; 0 if nothing is trained."""
    placement: tuple[str, ...]
    """Placement as typed; only for runtimes with ``places``."""
    debug: bool
    adapter_rank: int = 0
    """Rank of adapters, as in ``EngineStart``."""
    seed: int = 0
    """The run's seed."""


@runtime_checkable
class Checking(Protocol):
    """Optional interface of an engine's or backend's plugin with checks."""

    def check(self, start: RuntimeStart, devices: Mapping[str, str]) -> None:
        """Raise ``UserError`` for a run that it cannot take part in, as far as settings tell. Called before anything is loaded,
        also by ``--dry-run``.

        Args:
            devices: role → ``cpu``, ``cuda``, ... for roles in this process; others are not known yet.
        """


class Runtime(Protocol):
    """A started runtime. ``sync`` and ``close`` are called on the run's event loop and must not block it. The controller calls
    the rest.
    """

    @property
    def trainer(self) -> Trainer:
        """Trainer of all roles, which also computes with them."""

    @property
    def engine(self) -> Generator | None:
        """Engine for the requests of episodes; None if nothing is sampled."""

    @property
    def engines(self) -> Mapping[str, Generator]:
        """Engine of each frozen role that generates, by its name; used if the traits have ``generates``."""

    @property
    def source(self) -> WeightSource:
        """The actor's weights."""

    @property
    def targets(self) -> Sequence[SyncTarget]:
        """The engines that are running."""

    @property
    def context_lengths(self) -> Mapping[str, int]:
        """Longest row of each role, in tokens."""

    @property
    def exact(self) -> bool:
        """True if roles and engines all compute in 32 bits."""

    async def sync(self, version: int) -> None:
        """Call ``await bring(targets, source, version)`` while nothing else uses the weights. Repeat it if an engine died
        meanwhile.
        """

    def save_role(self, name: str, directory: Path) -> Writer | None:
        """Write a role in Hugging Face format, with the tokenizer.

        It may copy the role to host memory instead and return a function that writes the copy, so that training goes on
        meanwhile. The function returns when the files are complete.
        """

    def save_state(self, directory: Path) -> Writer | None:
        """Write optimizers and schedules of the trained roles into an existing directory, with a folder for each role; or copy
        them, as in ``save_role``.
        """

    def load_state(self, directory: Path) -> None:
        """Read what ``save_state`` wrote."""

    async def close(self) -> None:
        """End everything and leave no process. Works after a failed ``start``, and more than once."""


class RuntimePlugin(Protocol):
    """An entry point of the group ``rlhf.runtimes``."""

    @property
    def traits(self) -> RuntimeTraits:
        """Traits; they may depend on the options."""

    def describe(self, start: RuntimeStart) -> Iterable[str]:
        """Return lines for ``--dry-run``. Raises ``UserError`` for an impossible placement."""

    def start(self, start: RuntimeStart) -> Runtime:
        """Return the runtime when models are loaded and engines are ready. If it raises, nothing may be left running."""
