"""Decoding after prompts with pictures: the tower runs with the prompts, and tokens after them are like all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_host.engines.decoding import GenericDecoder, PlainDecoder, cache_name
from rlhf_host.models.heads import Head
from rlhf_host.models.layouts import Layout, padded_layout, to_device
from rlhf_host.models.pictures import Sight, features_of, inputs
from rlhf_host.records.pictures import shown_in


class _Prompts:
    """Prompts with pictures as a model takes them, and how far their positions are from their lengths."""

    def __init__(self, sight: Sight, device: torch.device):
        self._sight, self._device = sight, device
        self.deltas = torch.zeros(0, dtype=torch.int64)
        """``[B]``: what is added to the place of a row's next token to get its position."""

    def inputs(self, prompts: Sequence[Sequence[int]]) -> tuple[dict[str, Any], Tensor]:
        """Returns the arguments for the model, and the prompts' deltas."""
        images = [shown_in(prompt) for prompt in prompts]
        seen = self._sight.see(images)
        bare = padded_layout(prompts, torch.zeros(0, dtype=torch.int64), [0] * len(prompts))
        layout = to_device(self._sight.placed(bare, images, seen=seen), self._device)
        features = features_of(self._sight.base, seen, self._device)
        return inputs(self._sight.base, layout, features), self._deltas(layout, prompts)

    def _deltas(self, layout: Layout, prompts: Sequence[Sequence[int]]) -> Tensor:
        if layout.position_ids is None:
            return torch.zeros(len(prompts), dtype=torch.int64, device=self._device)
        lengths = [len(prompt) for prompt in prompts]
        ends = [int(layout.position_ids[:, row, :length].max()) + 1 for row, length in enumerate(lengths)]
        return torch.tensor(ends, device=self._device) - torch.tensor(lengths, device=self._device)

    def positions_of(self, counted: Tensor) -> Tensor:
        """Returns the positions ``[B, 1]``, or ``[3, B, 1]`` for models that place pictures, of tokens after the prompts."""
        places = counted + self.deltas[:, None]
        return places.expand(3, *places.shape) if hasattr(self._sight.base, "get_rope_index") else places


class PicturedDecoder(PlainDecoder):
    """``PlainDecoder`` for prompts with pictures."""

    def __init__(self, model: Any, head: Head | None, sight: Sight, autocast: torch.dtype | None = None):
        super().__init__(model, head, autocast)
        self._prompts = _Prompts(sight, self._device)
        self._base = sight.base

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        self._prompts.deltas = torch.zeros(len(prompts), dtype=torch.int64, device=self._device)
        return super().prefill(prompts)

    def _begin(self, prompts: Sequence[Sequence[int]], ids: Tensor, numbers: Sequence[int]) -> Tensor:
        given, deltas = self._prompts.inputs(prompts)
        self._prompts.deltas[list(numbers)] = deltas
        states: Tensor = self._base(**given, **{cache_name(self._base): self.cache}, use_cache=True).last_hidden_state
        return states

    @property
    def _positions(self) -> Tensor:
        return self._prompts.positions_of(self.cache.positions)

    def start(self, prompt_of_row: Tensor, longest: int) -> None:
        super().start(prompt_of_row, longest)
        self._prompts.deltas = self._prompts.deltas[prompt_of_row]

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self._prompts.deltas = self._prompts.deltas[rows]


class PicturedGenericDecoder(GenericDecoder):
    """``GenericDecoder`` for prompts with pictures."""

    def __init__(self, model: Any, sight: Sight):
        super().__init__(model)
        self._seen = _Prompts(sight, self._device)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        given, self._seen.deltas = self._seen.inputs(prompts)
        self._prompts, self._length = given["input_ids"], 0
        return self._forward(self._prompts, None, {"position_ids": None} | given)

    def _positions_of(self, counted: Tensor) -> Tensor:
        return self._seen.positions_of(counted)

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self._seen.deltas = self._seen.deltas[rows]
