"""The tokens of a pass, and the experts that they are to have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_host import RunError

ROUTED = "routed_experts"
"""Name of the experts among the traces of a row."""


@dataclass
class Pass:
    """One pass of a model over rows, in one or several calls of its decoder."""

    lengths: Sequence[int]
    """Tokens of each row."""
    traces: Sequence[Mapping[str, Any]] | None = None
    """True for each row whose experts are replayed."""
    counts: bool = False
    """The tokens of each expert are counted."""
    calls: int = 0
    chosen: Counter[int] = field(default_factory=Counter)
    """Layer → how often it chose experts for all tokens."""
    loads: dict[int, Tensor] = field(default_factory=dict)
    """Layer → ``[E]``: tokens of each expert."""
    changed: list[Tensor] = field(default_factory=list)
    """Per choice: ``[tokens]`` bool, true where other experts were replayed than the model would have chosen."""
    replayed: list[Tensor] = field(default_factory=list)
    """Per choice: ``[tokens]`` bool, true where experts were replayed."""
    real: Tensor = field(init=False)
    """``[tokens]`` bool: those of this call that are no padding."""
    routes: Tensor | None = None
    """``[tokens, layers, k]``, of this call."""
    known: Tensor | None = None
    """``[tokens]`` bool: those that have routes."""
    latest: Tensor | None = None
    """``[tokens, k]``: the experts of the last choice."""

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Finds row and column of each token that the decoder is called with.

        Args:
            inputs: keyword arguments of the decoder: rows with padding, one row alone, or one line of rows
                (``rlhf_host.protocols.SharedRows``), perhaps this process's slice of it.
        """
        given = inputs.get("input_ids")
        tokens: Tensor = inputs["inputs_embeds"][..., 0] if given is None else given
        device, (count, width) = tokens.device, tokens.shape
        shared, slices = inputs.get("shared_rows"), inputs.get("slices")
        lengths = torch.tensor(self.lengths, device=device)
        if shared is not None:
            number = torch.arange(width, device=device) + (0 if slices is None else slices.part * width)
            places = shared.back if slices is None else shared.back[number]
            rows, columns = places // shared.length, places % shared.length
            self.real = number < sum(shared.prompts) + sum(shared.lengths)
        else:
            first = 0 if count == len(self.lengths) else self.calls
            rows = torch.arange(first, first + count, device=device).repeat_interleave(width)
            columns = torch.arange(width, device=device).repeat(count)
            self.real = columns < lengths[rows]
        self.calls += 1
        if self.traces is not None:
            self._find_routes(rows, columns)

    def _find_routes(self, rows: Tensor, columns: Tensor) -> None:
        assert self.traces is not None
        own = [trace.get(ROUTED) for trace in self.traces]
        there = [one for one in own if one is not None]
        if not there:
            self.routes = self.known = None
            return
        sizes = torch.tensor([0 if one is None else len(one) for one in own], device=rows.device)
        table = torch.from_numpy(np.concatenate(there).astype(np.int16)).to(rows.device, non_blocking=True)
        starts = sizes.cumsum(0) - sizes
        self.known = self.real & (columns < sizes[rows])
        self.routes = table[torch.where(self.known, starts[rows] + columns, 0)]

    def refuse_misfits(self, model: str, layers: int, experts: int, chosen: int) -> None:
        """Raises ``RunError`` for experts that are not of such a model."""
        for trace in self.traces or ():
            if (one := trace.get(ROUTED)) is not None and (one.shape[1:] != (layers, chosen) or one.max(initial=0) >= experts):
                of = f"{one.shape[2]} of at least {int(one.max(initial=0)) + 1} experts in {one.shape[1]} layers"
                raise RunError(f"the engine took {of}, and {model} takes {chosen} of {experts} in {layers}")

    def choose(self, layer: int, scores: Tensor, own: Any, *, again: bool) -> Any:
        """Returns what a layer's ``topk`` over ``scores`` gives: ``own``, or the values of the experts that are replayed.

        Args:
            again: the layer is computed again in the backward pass.
        """
        if self.routes is None or self.known is None:
            taken = own
        else:
            indices = torch.where(self.known[:, None], self.routes[:, layer].long(), own.indices)
            taken = type(own)((scores.gather(-1, indices), indices))
        self.latest = taken.indices
        if again:
            return taken
        self.chosen[layer] += 1
        with torch.no_grad():
            if taken is not own and self.known is not None:
                before, after = (each.indices.sort(-1).values for each in (own, taken))
                self.changed.append((before != after).any(-1) & self.known)
                self.replayed.append(self.known)
            if self.counts:
                tokens = self.real[:, None].expand_as(taken.indices).float()
                load = torch.zeros(scores.shape[-1], device=scores.device)
                load.index_add_(0, taken.indices.flatten(), tokens.flatten())
                self.loads[layer] = self.loads[layer] + load if layer in self.loads else load
        return taken
