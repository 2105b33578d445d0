"""Bytes that the layers of a model keep for the backward pass, by the length of rows and the number of recomputed layers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rlhf_host.internals import recorded

USABLE = 0.9
"""Share of a device that is planned with; the rest is for the driver, kernels' workspaces and fragments, which is an estimate."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes by the length of a row: ``fixed + per_token · length + per_pair · length²``."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0

    @classmethod
    def through(cls, lengths: Sequence[int], sizes: Sequence[float]) -> Growth:
        """Returns the growth with these sizes at three lengths."""
        (one, two, far), (first, second, last) = lengths, sizes
        slope = (second - first) / (two - one)
        pair = ((last - first) / (far - one) - slope) / (far - two)
        token = slope - (one + two) * pair
        return cls(first - token * one - pair * one * one, token, pair)

    def of(self, rows: float, length: int) -> float:
        """Returns what rows of this length add to ``fixed``."""
        return rows * (self.per_token * length + self.per_pair * length * length)


@dataclass(frozen=True, slots=True)
class PassMemory:
    """Bytes that a pass keeps for its backward pass, beside the weights."""

    outside: Growth
    """Outside of layers."""
    layers: Sequence[Growth]
    inputs: Sequence[Growth]
    """Each layer's input, which is all that it keeps where it computes again."""

    @property
    def copies(self) -> float:
        """Copies of weights that autocast keeps until the pass ends."""
        return max(0.0, self.outside.fixed + sum(layer.fixed for layer in self.layers))

    def kept(self, rows: float, length: int, recomputed: int) -> float:
        """Returns the bytes at their most, beside ``copies``: with what one layer keeps where all compute again.

        Args:
            recomputed: the number of layers that do.
        """
        parts = [self.outside, *self.inputs[:recomputed], *self.layers[recomputed:]]
        last = max((layer.of(rows, length) for layer in self.layers), default=0.0) if recomputed >= len(self.layers) else 0.0
        return sum(part.of(rows, length) for part in parts) + last


def budget_rows(budget: int, longest: int) -> tuple[int, int]:
    """Returns the number and length of rows that fill a token budget; a row that is longer has a micro-batch of its own."""
    return max(1, math.ceil(budget / longest)), longest


def measured(model: nn.Module, layers: Sequence[nn.Module], run: Callable[[int], Any], lengths: Sequence[int]) -> PassMemory:
    """Measures passes with gradients.

    Args:
        model: one without recomputed layers.
        layers: each layer of the model, or one of the same kind that is measured in its place.
        run: a pass over one row of so many tokens.
    """
    found = [_kept(model, {*layers}, run, length) for length in lengths]
    outside = Growth.through(lengths, [one[0] for one in found])
    own, inputs = ({layer: Growth.through(lengths, [one[n][layer] for one in found]) for layer in {*layers}} for n in (1, 2))
    return PassMemory(outside, [own[layer] for layer in layers], [inputs[layer] for layer in layers])


def _kept(
    model: nn.Module, layers: set[nn.Module], run: Callable[[int], Any], length: int
) -> tuple[int, Mapping[nn.Module, int], Mapping[nn.Module, int]]:
    """Returns what a pass keeps outside of layers, each layer's part, and the bytes of its input."""
    own, inputs = Counter[nn.Module](), Counter[nn.Module]()
    with recorded(model) as kept, ExitStack() as undo:

        def before(layer: nn.Module, given: tuple[Tensor, ...], named: dict[str, Any]) -> None:
            inputs[layer] = (given[0] if given else named["hidden_states"]).nbytes
            own[layer] -= sum(kept.values())

        def after(layer: nn.Module, *_: Any) -> None:
            own[layer] += sum(kept.values())

        for layer in layers:
            undo.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
            undo.callback(layer.register_forward_hook(after).remove)
        run(length)
    return sum(kept.values()) - sum(own.values()), own, inputs
