"""Interface of backends, which make optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rlhf_host.protocols.common import Buckets, Tensors, Traits, Writer
from rlhf_host.protocols.splits import Slices

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rlhf_host.config.schema import RoleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTraits(Traits):
    parts: int = 1
    """Number of neighbouring processes that together hold one copy of a model. They get the same rows."""
    even_passes: bool = False
    """Ranks exchange tensors inside passes. So all must run the same number of passes, with gradients in the same order."""
    sharded: bool = False
    """True if weights are complete only inside ``run_pass``."""
    state_bytes: int = 0
    """Bytes per trained number for gradient and optimizer, beside the weight, on the same device, in every process. 0: less, or
    unknown.
    """
    loads_shards: bool = False
    """True if a model may come without its weights (``BackendStart.weights``). Then it must be ``sharded``."""
    splits_frozen: bool = False
    """The plugin also has ``split`` (``SplitsFrozen``), for models that are not trained, on several ranks."""
    everywhere: bool = False
    """``weights`` also takes ``everywhere``, so that every rank can send to the engine on its own GPU."""
    masters: bool = False
    """Where passes compute in 16 bits, it gets trained weights in 16 bits, adds their gradients to those of their ``master``, a
    parameter in float32, and rounds the masters anew after each step. Otherwise trained weights have 32 bits, under autocast.
    """
    saved_bytes: int = 0
    """Bytes per trained number of what ``save`` writes, in all files of all ranks together. 0: unknown."""


class Ranks(Protocol):
    """The processes of a role's group. Both methods are collective."""

    rank: int
    """Number of this process's rank, among ``size``."""
    size: int
    part: int
    """Number of this process among the ``parts`` that share the rank's rows."""
    parts: int
    processes: int
    """``size × parts``."""
    process: int
    """Number of this process, among all."""
    slices: Slices | None
    """None, unless the parts of a rank compute slices of lines (sequence parallelism): each then has a gradient of its own."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in order."""

    def sum_(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its sum over all processes."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step. ``grad_norm`` is the norm before clipping. ``applied`` is False if it was not finite; then nothing was
    changed.
    """

    grad_norm: float
    lr: float
    applied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStart:
    """The argument of ``BackendPlugin.start``."""

    model: nn.Module
    """Model with the weights and their names."""
    compute: nn.Module
    """Module that passes run: ``model``, or a twin with the same parameters."""
    head: tuple[nn.Parameter, ...]
    """Parameters that ``run_head`` uses without calling their module's ``forward``."""
    role: RoleConfig
    """The settings of ``--roles.NAME``: ``schedule``, ``betas``, ``max_grad_norm``, ... and ``peak_lr``: ``lr`` or its default."""
    total_updates: int
    """Number of this role's optimizer updates in the whole run, for the schedule."""
    ranks: Ranks
    weights: Callable[[], Buckets] | None = None
    """None, or the parameters of ``model`` are on ``meta``, except those of adapters, and this reads them from files: it yields
    their names and whole tensors in CPU memory, block by block, of which the backend keeps what this process holds.
    """
    device: torch.device | None = None
    """Device for the weights that are on ``meta``."""


class Backend(Protocol):
    """One trained role, on the compute thread. Every rank calls all methods except ``backward`` and ``discard``."""

    exact: bool
    """True if it computes in 32 bits."""
    lr: float
    """Peak learning rate. It may be set between steps."""

    def run_pass(self, compute: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
        """Return ``compute(*inputs)``, run where the weights are complete. Used only with ``sharded`` or ``even_passes``."""

    def run_head(self, compute: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
        """Does the same for the head, inside ``run_pass``."""

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Add to the gradient. ``loss`` is a share of the whole batch's loss, so gradients are summed over passes and ranks.

        Args:
            last: this is the last call before ``step``.
        """

    def step(self) -> StepResult:
        """Clip the gradient and make a step, or make none if the norm is not finite."""

    def discard(self) -> None:
        """Drop the gradients computed so far."""

    def save(self, directory: Path) -> Writer | None:
        """Write the state of optimizer and schedule into a directory that all ranks can see.

        It may copy the state to host memory instead and return a function that writes the copy, so that training goes on
        meanwhile.
        """

    def load(self, directory: Path) -> None:
        """Read this state. Raises ``UserError`` for a checkpoint of another backend."""

    def save_model(self, directory: Path) -> Writer | None:
        """Write the model in Hugging Face format, or copy it, as in ``save``: rank 0 all of it, or every rank files of its own.

        The directory is one that all ranks can see, and nobody reads it before all writers are done.
        """

    def weights(self, bucket_bytes: int) -> Buckets:
        """Yield buckets as ``Weights.buckets`` does: complete on rank 0; other ranks may yield empty ones.

        With the trait ``everywhere`` it also takes ``everywhere: bool = False``; if true, buckets are complete on every rank.
        """

    def offload(self) -> None:
        """Move what only training needs off the device. May do nothing.

        Until ``reload``, only ``weights``, ``save`` and ``save_model`` may be called. They give what was there, or raise
        ``RunError``. The host calls ``reload`` before everything.
        """

    def reload(self) -> None:
        """Undo ``offload``."""


@runtime_checkable
class ShowsGradients(Protocol):
    """Optional interface of a backend."""

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every trained weight's name and the sum of its gradient over passes and ranks. Collective."""


class BackendPlugin(Protocol):
    """An entry point of the group ``rlhf.backends``."""

    @property
    def traits(self) -> BackendTraits:
        """Traits; they may depend on the options."""

    def start(self, start: BackendStart) -> Backend:
        """Start training this role. Raises ``UserError`` if the role cannot be trained this way."""
