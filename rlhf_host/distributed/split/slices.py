"""Sequence parallelism: neighbouring processes compute a slice each of one line (Ulysses, arXiv:2309.14509).

Everything that works token by token runs on a process's own tokens. Before attention one exchange trades tokens for heads,
after it another trades back, so every attention function sees whole rows, with a part of the heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_host.errors import UserError
from rlhf_host.models.layouts import Layout, Line
from rlhf_host.protocols import Tensors

PLACES = {"scores": "scored", "bootstrap": "last", "token_scores": "own"}
"""Results that are read elsewhere than where tokens are predicted: fields of ``Line``."""


@dataclass(frozen=True)
class LineSlices:
    """This process's place among the ``count`` that share a line."""

    group: Any
    part: int
    count: int

    def refuse(self, config: Any, *, routed: bool) -> None:
        """Raises ``UserError`` for a model whose heads cannot be dealt to the processes, or with a loss of routers."""
        heads = getattr(config, "num_attention_heads", None) or 0
        if not heads or heads % self.count:
            raise UserError(
                f"sequence_parallel {self.count} deals attention heads to processes, and the model has {heads}: choose a divisor"
            )

        if routed:
            raise UserError(
                "sequence_parallel does not compute the loss of routers: set router_aux_loss_coef 0, or leave it out"
            )

    def size(self, tokens: int) -> int:
        """Returns the tokens of each process in a line of ``tokens``, which is padded to a multiple."""
        return -(-tokens // self.count)

    def inputs(self, layout: Layout) -> dict[str, Any]:
        """Returns the keyword arguments for a decoder: this process's tokens of a shared line."""
        assert layout.rows is not None
        assert layout.position_ids is not None
        tokens = layout.input_ids.shape[1]
        size = self.size(tokens)
        padding = (0, size * self.count - tokens)
        own = slice(self.part * size, (self.part + 1) * size)

        def cut(line: Tensor) -> Tensor:
            return torch.nn.functional.pad(line, padding)[:, own]

        rows = replace(layout.rows, back=torch.nn.functional.pad(layout.rows.back, padding))
        whole = replace(layout, input_ids=cut(layout.input_ids), position_ids=cut(layout.position_ids), rows=rows)
        return {**whole.inputs(), "slices": self}

    def attend(
        self,
        attend: Callable[..., tuple[Tensor, None]],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *arguments: Any,
        **named: Any,
    ) -> tuple[Tensor, None]:
        """Computes attention of some heads of all processes' tokens, and returns this one's tokens."""
        query, key, value = self.to_heads(query, key, value)
        groups = SimpleNamespace(
            num_key_value_groups=query.shape[1] // key.shape[1],
            is_causal=getattr(module, "is_causal", True),
            training=module.training,
        )
        return self.to_tokens(attend(groups, query, key, value, *arguments, **named)[0]), None

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Trades ``[1, H, N/S, D]`` for ``[1, H/S, N, D]``. Key heads are repeated where there are fewer than processes."""
        if (few := key.shape[1]) % self.count:
            wanted = query.shape[1] if self.count % few else self.count
            key, value = (heads.repeat_interleave(wanted // few, 1) for heads in (key, value))
        traded: tuple[Tensor, Tensor, Tensor] = _Trade.apply(self, 1, 2, query, key, value)  # type: ignore[no-untyped-call]
        return traded

    def to_tokens(self, result: Tensor) -> Tensor:
        """Trades ``[1, N, H/S, D]`` for ``[1, N/S, H, D]``."""
        traded: tuple[Tensor] = _Trade.apply(self, 1, 2, result)  # type: ignore[no-untyped-call]
        return traded[0]

    def reading(self, line: Line, read: Callable[[Line, Tensor], Tensors]) -> Callable[[Tensor], Tensors]:
        """Returns ``read`` for this process's states. What it returns is of all processes: the loss of it is the same in all,
        and each takes the gradient of its own.

        Args:
            read: results ``[C, ...]`` at the places of a line, or ``[B]`` of its rows.
        """
        own, numbers = self._own_line(line)

        def joined(states: Tensor) -> Tensors:
            whole = {}
            for name, values in read(own, states).items():
                field = PLACES.get(name, "predicts")
                zeros = values.new_zeros((len(getattr(line, field)), *values.shape[1:]))
                whole[name] = _Sum.apply(self, zeros.index_copy(0, numbers[field], values))  # type: ignore[no-untyped-call]
            return whole

        return joined

    def _own_line(self, line: Line) -> tuple[Line, dict[str, Tensor]]:
        """Returns the line with the places of this process's tokens alone, and the numbers of these places by field."""
        [layout] = line.layouts
        size = self.size(layout.input_ids.shape[1])
        start = self.part * size
        numbers: dict[str, Tensor] = {}
        places: dict[str, Any] = {}
        for name in {"predicts", *PLACES.values()}:
            whole: Tensor = getattr(line, name)
            numbers[name] = ((whole >= start) & (whole < start + size)).nonzero().squeeze(-1)
            places[name] = whole[numbers[name]] - start
        at, targets = line.at[numbers["predicts"]], line.targets[numbers["predicts"]]
        mask = torch.zeros_like(line.mask).view(-1).index_fill(0, at.cpu(), value=True).view_as(line.mask)
        support = None if line.support is None else line.support[numbers["predicts"].cpu().numpy()]
        return replace(line, **places, at=at, targets=targets, mask=mask, support=support), numbers


class _Trade(torch.autograd.Function):
    """An exchange that splits one dimension over processes and joins another; its backward pass is the opposite."""

    @staticmethod
    def forward(ctx: Any, slices: LineSlices, split: int, join: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.slices, ctx.split, ctx.join = slices, split, join
        return _exchange(slices, split, join, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_exchange(ctx.slices, ctx.join, ctx.split, gradients)


def _exchange(slices: LineSlices, split: int, join: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    parts = [tensor.chunk(slices.count, split) for tensor in tensors]
    shapes = [each[0].shape for each in parts]
    sent = torch.cat([each[number].reshape(-1) for number in range(slices.count) for each in parts])
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=slices.group)
    sizes = [shape.numel() for shape in shapes]
    arrived = [block.split(sizes) for block in got.chunk(slices.count)]
    return tuple(torch.cat([block[number].view(shape) for block in arrived], join) for number, shape in enumerate(shapes))


class _Sum(torch.autograd.Function):
    """The sum over processes of what each has; the gradient of it is the same in all."""

    @staticmethod
    def forward(ctx: Any, slices: LineSlices, own: Tensor) -> Tensor:
        whole = own.clone()
        dist.all_reduce(whole, group=slices.group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient
