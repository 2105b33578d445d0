"""Backends: what makes optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_host.protocols.common import Buckets, Tensors, Traits

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlhf_host.config.schema import RoleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTraits(Traits):
    parts: int = 1
    """Neighbouring processes that hold one copy of a model between them; they are given the same rows."""
    even_passes: bool = False
    """Every rank must run equally many passes, with gradients in the same order, because tensors move between ranks in them."""
    sharded: bool = False
    """Weights are whole only inside ``run_pass``."""


class Ranks(Protocol):
    """The processes of a role's group. Both methods are collective."""

    rank: int
    """Of this process's rows among ``size``."""
    size: int
    part: int
    """Of this process among the ``parts`` that share the rank's rows."""
    parts: int

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in order."""

    def sum_(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its sum over the processes."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """``grad_norm`` before clipping; ``applied`` is False when it was not finite and weights and schedule were left alone."""

    grad_norm: float
    lr: float
    applied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStart:
    """Given to ``BackendPlugin.start``."""

    model: nn.Module
    """Names the weights."""
    compute: nn.Module
    """What passes run: ``model``, or a twin of it around the same parameters."""
    head: tuple[nn.Parameter, ...]
    """Parameters that are used outside of their own module's forward, in ``run_head``."""
    role: RoleConfig
    """Learning rate, schedule, clipping."""
    total_updates: int
    """Optimizer updates of the whole run, for the schedule."""
    ranks: Ranks


class Backend(Protocol):
    """One trained role, on the compute thread. Collective over ranks but for ``backward`` and ``discard``."""

    exact: bool
    """It computes in 32 bits."""
    lr: float
    """Peak learning rate; may be set between steps."""

    def run_pass(self, compute: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
        """``compute(*inputs)`` where the weights are. Called only where traits say ``sharded`` or ``even_passes``."""

    def run_head(self, compute: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
        """The same around the head, inside ``run_pass``."""

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Accumulate. ``loss`` is a share of the whole batch's loss, so gradients sum over passes and ranks.

        Args:
            last: no other backward comes before ``step``.
        """

    def step(self) -> StepResult:
        """Clip and step, or refuse a gradient norm that is not finite."""

    def discard(self) -> None:
        """Forget the gradients accumulated so far."""

    def save(self, directory: Path) -> None:
        """Write the optimizer's and schedule's state into a directory that all ranks see."""

    def load(self, directory: Path) -> None:
        """Take it back. Raises ``UserError`` for what another kind of backend wrote."""

    def save_model(self, directory: Path) -> None:
        """Write the model in Hugging Face format, by rank 0."""

    def weights(self, bucket_bytes: int) -> Buckets:
        """As ``protocols.Weights.buckets``: whole on rank 0, perhaps empty elsewhere."""

    def offload(self) -> None:
        """Move what only training needs off the device; may do nothing."""

    def reload(self) -> None:
        """Undo ``offload``."""


class BackendPlugin(Protocol):
    """An entry point of the group ``rlhf.backends``."""

    @property
    def traits(self) -> BackendTraits:
        """May depend on the options."""

    def start(self, start: BackendStart) -> Backend:
        """Take over the role's optimizer. Raises ``UserError`` when it cannot train this role so."""
