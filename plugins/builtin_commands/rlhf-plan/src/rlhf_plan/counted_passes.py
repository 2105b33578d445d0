"""Operations of passes with their FLOPs and bytes, counted on tensors without data: the model's own code, so every architecture
that runs at all is counted as it is.

As in ``benchmarks/gpu_roofline.py`` models of few layers are counted, and a whole one follows from what more layers add.
"""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry
from transformers.integrations import moe

from rlhf_host import UserError
from rlhf_host.commands import first_line
from rlhf_host.internals import decoder_of, enable_shared_rows
from rlhf_host.settings import RoleConfig
from rlhf_plan.footprint import fake_weights
from rlhf_plan.short_models import layers_of, write_configuration

FREE = {
    "detach",
    "alias",
    "_unsafe_view",
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "lift_fresh",
}
"""Operations that a device is not asked for, beside views."""
ATTENTION = "_scaled_dot_product"


class Operation(NamedTuple):
    """One operation on a device."""

    flops: float
    """Operations of matrix products and attention."""
    bytes: int
    """Read and written, each tensor once."""


Price = Callable[[Operation], float]
"""Seconds of an operation."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Operations of a pass over the layers of a model, without its head, by number of layers."""

    counts: Mapping[int, Counter[Operation]]
    layers: int

    def total(self, value: Callable[[Operation], float]) -> float:
        """Returns the sum over the whole model's operations."""
        sums = {depth: sum(value(one) * times for one, times in counts.items()) for depth, counts in self.counts.items()}
        (few, first), *more = sorted(sums.items())
        if not more:
            return first
        [(many, second)] = more
        return first + (second - first) * (self.layers - few) / (many - few)


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts of one micro-batch, or of one token for each of several rows."""

    forward: Pass
    backward: Pass | None


def count(
    role: RoleConfig, head: Literal["lm", "scalar"], rows: int, length: int, *, backward: bool, width: int = 2
) -> Counted:
    """Counts passes.

    Args:
        width: bytes of a weight.

    Raises:
        UserError: the model does not run without its weights.
    """
    layers = layers_of(role, head)
    depths = [layers.count] if layers.count <= 2 * layers.period else [layers.period, 2 * layers.period]
    forward, back = {}, {}
    for depth in depths:
        with tempfile.TemporaryDirectory() as place:
            model = write_configuration(role, head, depth, Path(place) / "model")
        forward[depth], back[depth] = _counted(model, rows, length, backward=backward, width=width)
    return Counted(Pass(forward, layers.count), Pass(back, layers.count) if backward else None)


def _counted(
    model: Any, rows: int, length: int, *, backward: bool, width: int
) -> tuple[Counter[Operation], Counter[Operation]]:
    enable_shared_rows()
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level, logger.level = logger.level, logging.CRITICAL
    first, second = _Counting(), _Counting()
    try:
        whole_products = mock.patch.object(moe, "_can_use_grouped_mm", return_value=False)
        with FakeTensorMode(), torch.set_grad_enabled(backward), whole_products:
            fake_weights(model, torch.bfloat16 if width == 2 else None)
            ids = torch.zeros(rows, length, dtype=torch.int64)
            with first:
                hidden = decoder_of(model)(input_ids=ids, use_cache=True).last_hidden_state
            with second if backward else nullcontext():
                if backward:
                    hidden.sum().backward()
    except Exception as error:
        raise UserError(
            f"a pass of {type(model).__name__} cannot be counted without its weights: {first_line(error)}"
        ) from error
    finally:
        logger.level = level
    return first.operations, second.operations


class _Counting(TorchDispatchMode):
    """Notes each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = Counter[Operation]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "prim" or func.is_view or name in FREE:
            return out
        tensors = [each for each in tree_flatten((args, kwargs, out))[0] if isinstance(each, Tensor)]
        if moved := sum(each.nbytes for each in {id(each): each for each in tensors}.values()):
            self.operations[Operation(_flops(func, args, kwargs or {}, out), moved)] += 1
        return out


def _flops(func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> float:
    """Raises ``TypeError`` for operations of packages, whose FLOPs nobody knows here."""
    name = func.overloadpacket.__name__
    if "grouped_mm" in name:  # each row with the matrix of its expert
        return 2.0 * args[0].shape[-2] * args[0].shape[-1] * args[1].shape[-1]
    if name.startswith(ATTENTION):
        return _attention_flops(name, args, kwargs)
    if func.overloadpacket in flop_registry:
        return float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out))
    if func.namespace != "aten":
        raise TypeError(f"what the operation {func.namespace}::{name} computes is not known")
    return 0.0


def _attention_flops(name: str, args: Any, kwargs: Mapping[str, Any]) -> float:
    """Two products forward and five backward; half of them where no token sees later ones."""
    backward = "backward" in name
    query, key, value = args[1:4] if backward else args[:3]
    products = 5 if backward else 2
    causal = bool(kwargs.get("is_causal", next((each for each in args if isinstance(each, bool)), False)))
    rows, heads, queries, size = query.shape
    whole = products * 2.0 * rows * heads * queries * key.shape[2] * (size + value.shape[3]) / 2
    return whole / 2 if causal and queries > 1 else whole
