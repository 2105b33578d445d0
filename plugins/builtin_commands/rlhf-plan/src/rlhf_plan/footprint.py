"""Memory of a model's passes, measured without the model: torch's fake tensors have shapes and types, and no data."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations import moe

from rlhf_host import UserError
from rlhf_host.commands import first_line
from rlhf_host.internals import blocks_of, decoder_of, enable_shared_rows
from rlhf_plan.pass_memory import PassMemory, measured

LENGTHS = (1, 2, 1024)
"""Rows that are measured: what a pass keeps grows with a row's length, and with its square where scores of attention are kept."""
TOKENS = 64
"""Length of the row whose cache is counted."""
SAMPLED = 2
"""Blocks of each kind that are run: what all blocks share is kept by the first one."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a pass, beside the weights."""

    passed: PassMemory
    cached: int
    """Numbers in the cache, for each token."""


def footprint(model: Any, *, width: int | None, autocast: bool) -> Footprint:
    """Measures passes.

    Args:
        model: one on the meta device (``rlhf_host.internals.meta_model``) without recomputed blocks; it is left with fake weights.
        width: bytes of a weight in passes; None: as it is.

    Raises:
        UserError: the model does not run without its weights.
    """
    enable_shared_rows()
    blocks = _blocks(model)
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level, logger.level = logger.level, logging.CRITICAL
    try:
        # Products of experts have no fake form in 32 bits, except by what transformers falls back to; it keeps the same.
        whole_products = mock.patch.object(moe, "_can_use_grouped_mm", return_value=False)
        with FakeTensorMode(), torch.enable_grad(), blocks.sampled(), whole_products:
            fake_weights(model, torch.bfloat16 if width == 2 else None)
            passed = measured(model, blocks.like(), partial(_run, model, 1, autocast=autocast), LENGTHS)
            cached = blocks.cached(model)
    except Exception as error:
        raise UserError(
            f"what a pass of {type(model).__name__} keeps cannot be computed without its weights: {first_line(error)}"
        ) from error
    finally:
        logger.level = level
    return Footprint(passed, cached)


@dataclass(slots=True)
class _Blocks:
    """The blocks of a model by kind: equal blocks keep the same."""

    home: nn.ModuleList | None
    kinds: list[list[int]]

    @contextlib.contextmanager
    def sampled(self) -> Iterator[None]:
        """Lets the first blocks of each kind compute, and all others pass on what they get."""
        if self.home is None:
            yield
            return
        every = list(self.home)
        for kind in self.kinds:
            for place in kind[SAMPLED:]:
                self.home[place] = _Passing(every[place])
        try:
            yield
        finally:
            for place, block in enumerate(every):
                self.home[place] = block

    def like(self) -> list[nn.Module]:
        """Returns for each block one of its kind that computes."""
        if self.home is None:
            return []
        sampled = {place: kind[min(number, SAMPLED - 1)] for kind in self.kinds for number, place in enumerate(kind)}
        return [self.home[sampled[place]] for place in range(len(self.home))]

    def cached(self, model: Any) -> int:
        """Counts the numbers in the cache of a short row, for each token."""
        with torch.no_grad():
            out = _run(model, 1, TOKENS)
        layers = out.get("cache", out.get("past_key_values"))  # the first since transformers 5.24
        sizes = defaultdict[int, int](int)
        for place, layer in enumerate(getattr(layers, "layers", ())):
            held = (getattr(layer, name, None) for name in ("keys", "values"))
            sizes[place] = sum(each.numel() for each in held if isinstance(each, Tensor))
        if self.home is None:
            return sum(sizes.values()) // TOKENS
        return sum(sizes[kind[0]] * len(kind) for kind in self.kinds) // TOKENS


class _Passing(nn.Module):
    """Stands for a block, and returns its input."""

    def __init__(self, block: nn.Module):
        super().__init__()
        vars(self).update({name: value for name, value in vars(block).items() if name not in vars(self)})

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def _blocks(model: Any) -> _Blocks:
    if not (names := blocks_of(model)):
        return _Blocks(None, [])
    home = model.get_submodule(next(iter(names)).rpartition(".")[0])
    types = getattr(model.config.get_text_config(), "layer_types", None) or [None] * len(home)
    kinds = defaultdict[Any, list[int]](list)
    for place, block in enumerate(home):
        shapes = tuple((name, weight.shape, weight.requires_grad) for name, weight in block.named_parameters())
        kinds[type(block), shapes, types[place]].append(place)
    return _Blocks(home, list(kinds.values()))


def fake_weights(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Replaces weights and buffers by fake ones, under a ``FakeTensorMode``. Tensors that are one stay one."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    weight = isinstance(tensor, nn.Parameter)
                    kind = dtype if dtype and weight and tensor.is_floating_point() else tensor.dtype
                    empty = torch.empty(tensor.shape, dtype=kind, device="cpu")
                    made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if weight else empty
                held[name] = made[id(tensor)]


def _run(model: Any, rows: int, length: int, *, autocast: bool = False) -> Any:
    # With a cache transformers makes no mask, which it would for a fake row whose positions it cannot read.
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return decoder_of(model)(input_ids=torch.zeros(rows, length, dtype=torch.int64), use_cache=True)
