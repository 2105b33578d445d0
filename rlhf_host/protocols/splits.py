"""Interfaces for models whose weights several processes split, and for lines of rows that they split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlhf_host.protocols.common import Buckets, Tensors

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from rlhf_host.config.schema import RoleConfig
    from rlhf_host.protocols.backends import BackendStart


@dataclass(slots=True)
class ShardedModel:
    """A model that has no weights yet."""

    model: PreTrainedModel
    """Its parameters are on ``meta``, except those of adapters; buffers are on the role's device."""
    probe: PreTrainedModel | None
    """A model of the same kind on the role's device, with few layers and random weights, to be examined in its place; None once
    that is done.
    """
    weights: Callable[[], Buckets]
    """Yields the parameters that are on ``meta``, by their names in ``model``, block by block, as whole tensors in CPU memory.

    Raises ``UserError`` for files that lack a weight, or have one of another shape.
    """


class LoadsShards(Protocol):
    """Optional interface of a backend's plugin, with the trait ``loads_shards``."""

    def load_model(self, role: RoleConfig, *, head: Literal["lm", "scalar"], trainable: bool) -> ShardedModel | None:
        """Load a role's model without its weights. None: it can only be loaded whole, which the host does then.

        ``rlhf_host.distributed.load_sharded`` does this for models that transformers can read.
        """


class RunsPasses(Protocol):
    """A model that is not trained, in the hands of a backend."""

    exact: bool
    """False if the backend lets passes compute in 16 bits."""

    def run_pass(self, compute: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
        """Do the same as in ``Backend``."""

    def run_head(self, compute: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
        """Do the same as in ``Backend``."""


class SplitsFrozen(Protocol):
    """Optional interface of a backend's plugin, with the trait ``splits_frozen``."""

    def split(self, start: BackendStart) -> RunsPasses:
        """Split a model that is not trained over the ranks. ``total_updates`` is 0."""


class Slices(Protocol):
    """This process's part of every line of rows, where neighbouring processes compute one line (sequence parallelism). All of them
    get the same results.
    """

    def refuse(self, config: Any, *, routed: bool) -> None:
        """Raise ``UserError`` for a model that cannot be computed in slices. ``routed``: it has a loss of routers."""

    def size(self, tokens: int) -> int:
        """Return the tokens of each process in a line of ``tokens``."""

    def inputs(self, layout: Any) -> dict[str, Any]:
        """Return the keyword arguments for a decoder: this process's tokens of a shared line, and ``slices``, this object."""

    def attend(self, attend: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Tensor, None]:
        """Call ``attend`` with whole lines and some of the heads. Arguments and result have this process's tokens."""

    def reading(self, line: Any, read: Callable[[Any, Tensor], Tensors]) -> Callable[[Tensor], Tensors]:
        """Return ``read`` for this process's hidden states; what it returns is of all processes."""
