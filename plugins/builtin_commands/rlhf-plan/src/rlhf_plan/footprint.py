"""Memory of a model's passes, measured without the model: torch's fake tensors have shapes and types, and no data."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations import moe

from rlhf_host import UserError
from rlhf_host.commands import first_line
from rlhf_host.internals import decoder_of, enable_shared_rows, recorded

LENGTHS = (1, 2, 1024)
"""Rows that are measured: what a pass keeps grows with a row's length, and with its square where scores of attention are kept."""
TOKENS = 64
"""Length of the row whose cache is counted."""
SAMPLED = 2
"""Blocks of each kind that are run: what all blocks share is kept by the first one."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes by the length of a row: ``fixed + per_token · length + per_pair · length²``."""

    fixed: float
    per_token: float
    per_pair: float

    @classmethod
    def through(cls, sizes: Sequence[float]) -> Growth:
        """Returns the growth with these sizes at ``LENGTHS``."""
        one, two, far = LENGTHS
        first, second, last = sizes
        pair = ((last - first) / (far - one) - (second - first)) / (far - two)
        token = second - first - 3 * pair
        return cls(first - token - pair, token, pair)

    def of(self, rows: int, length: int) -> float:
        """Returns what rows of this length add to ``fixed``."""
        return rows * (self.per_token * length + self.per_pair * length * length)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a pass, beside the weights."""

    whole: Growth
    """All that is kept for the backward pass. ``fixed`` are copies of weights that autocast keeps until the pass ends."""
    outside: Growth
    """Its part outside of blocks."""
    largest: Growth
    """The part of the largest block."""
    inputs: Growth
    """Inputs of all blocks."""
    cached: int
    """Numbers in the cache, for each token."""

    @property
    def copies(self) -> float:
        return max(0.0, self.whole.fixed)

    def kept(self, rows: int, length: int, *, recomputed: bool) -> float:
        """Returns the bytes that a pass over such rows keeps, at their most: with what one block keeps where blocks are computed
        again.
        """
        parts = (self.outside, self.inputs, self.largest) if recomputed else (self.whole,)
        return sum(part.of(rows, length) for part in parts)


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
            _fake(model, torch.bfloat16 if width == 2 else None)
            found = [blocks.kept(model, length, autocast) for length in LENGTHS]
            cached = blocks.cached(model)
    except Exception as error:
        raise UserError(
            f"what a pass of {type(model).__name__} keeps cannot be computed without its weights: {first_line(error)}"
        ) from error
    finally:
        logger.level = level
    whole, outside, largest, inputs = (Growth.through(sizes) for sizes in zip(*found, strict=True))
    return Footprint(whole, outside, largest, inputs, cached)


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

    def kept(self, model: Any, length: int, autocast: bool) -> tuple[float, float, float, float]:
        """Runs a pass over one row, and returns what it keeps: all, outside of blocks, by the largest block; and the blocks'
        inputs.
        """
        own, inputs, hooks = Counter[int](), Counter[int](), []
        with recorded(model) as kept, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for place in (place for kind in self.kinds for place in kind[:SAMPLED]):

                def before(_: Any, given: Any, named: Any, place: int = place) -> None:
                    inputs[place] = (given[0] if given else named["hidden_states"]).nbytes
                    own[place] -= sum(kept.values())

                def after(_: Any, __: Any, ___: Any, place: int = place) -> None:
                    own[place] += sum(kept.values())

                assert self.home is not None
                block = self.home[place]
                hooks += [block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after)]
            try:
                _run(model, 1, length)
            finally:
                for hook in hooks:
                    hook.remove()
        outside = sum(kept.values()) - sum(own.values())
        others = sum((len(kind) - len(kind[:SAMPLED])) * own[kind[:SAMPLED][-1]] for kind in self.kinds)
        entered = sum(inputs[kind[0]] * len(kind) for kind in self.kinds)
        return sum(kept.values()) + others, outside, max(own.values(), default=0), entered

    def cached(self, model: Any) -> int:
        """Counts the numbers in the cache of a short row, for each token."""
        with torch.no_grad():
            layers = _run(model, 1, TOKENS).past_key_values
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


def block_list(model: Any) -> nn.ModuleList | None:
    """Returns the longest list of the model's blocks (``_no_split_modules``), if it has one."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    lists = (each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each))
    of_blocks = [each for each in lists if all(type(block).__name__ in names for block in each)]
    return max(of_blocks, key=len, default=None)


def _blocks(model: Any) -> _Blocks:
    home = block_list(model)
    if home is None:
        return _Blocks(None, [])
    types = getattr(model.config.get_text_config(), "layer_types", None) or [None] * len(home)
    kinds = defaultdict[Any, list[int]](list)
    for place, block in enumerate(home):
        shapes = tuple((name, weight.shape, weight.requires_grad) for name, weight in block.named_parameters())
        kinds[type(block), shapes, types[place]].append(place)
    return _Blocks(home, list(kinds.values()))


def _fake(model: nn.Module, dtype: torch.dtype | None) -> None:
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


def _run(model: Any, rows: int, length: int) -> Any:
    # With a cache transformers makes no mask, which it would for a fake row whose positions it cannot read.
    return decoder_of(model)(input_ids=torch.zeros(rows, length, dtype=torch.int64), use_cache=True)


def rows_of(budget: int, longest: int) -> tuple[int, int]:
    """Returns the number and length of rows that fill a token budget; a row that is longer has a micro-batch of its own."""
    return max(1, math.ceil(budget / longest)), longest
