"""A cache of keys and values that stays where it is: one slot for each row, with room for a fixed number of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

Layers = Mapping[int, tuple[Tensor, Tensor]]
"""Layer → keys and values ``[rows, kv, tokens, D]``."""


class SlotCache(Cache):
    """Keys and values ``[rows, kv, room, D]`` of rows at different lengths. Each step writes those of one token of each row to
    ``positions``, and attention sees all room, of which a mask hides what a row has not reached.
    """

    def __init__(self, rows: int, room: int, like: Layers, positions: Tensor, dtype: torch.dtype | None) -> None:
        """Creates the cache for layers as ``like`` has them, in ``dtype``; None: in theirs."""
        super().__init__(layers=[])
        self.rows, self.room, self.positions = rows, room, positions
        self._every_row = torch.arange(rows, device=positions.device)
        self._place = torch.arange(room, device=positions.device)
        self.layers_held: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, pair in like.items():
            keys, values = (one.new_zeros(rows, one.shape[1], room, one.shape[3], dtype=dtype or one.dtype) for one in pair)
            self.layers_held[layer] = keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        return []

    def take(self, source: Layers, which: Tensor, slots: Tensor) -> None:
        """Copies rows ``which`` of ``source`` to ``slots``."""
        for layer, pair in source.items():
            for held, one in zip(self.layers_held[layer], pair, strict=True):
                width = min(self.room, one.shape[2])
                held[slots, :, :width] = one[which, :, :width].to(held.dtype)
                held[slots, :, width:] = 0  # of a row whose numbers were not finite, also hidden ones would spoil this one

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.layers_held[layer_idx]
        keys[self._every_row, :, self.positions] = key_states.squeeze(2).to(keys.dtype)
        values[self._every_row, :, self.positions] = value_states.squeeze(2).to(values.dtype)
        return keys, values

    def seen(self, window: int | None) -> Tensor:
        """Returns ``[rows, 1, 1, room]`` bool: what the next token of each row sees."""
        last = self.positions[:, None]
        mask = self._place <= last
        if window is not None:
            mask = mask & (self._place > last - window)
        return mask[:, None, None, :]
