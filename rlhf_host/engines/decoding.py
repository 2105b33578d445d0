"""Decoding with transformers' own modules: prompts in, next-token logits out, one token per row and step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from rlhf_host.errors import UserError
from rlhf_host.models.heads import Head, decoder_of
from rlhf_host.models.loading import context_length

PREFILL_TOKENS = 8192
"""Padded tokens of one prefill pass, which bound its activations."""
FIRST_ROOM = 64
"""Number of tokens that rows have room for at first; it doubles when it is used up."""


class RowCache(Cache):
    """Keys and values of right-padded prompts, then of the rows that continue them.

    Slots ``[0, width)`` are a row's prompt, the others its own tokens, so all rows append at the same slot. A mask hides the
    slots between a short prompt and the row's own tokens, and slots outside a sliding window.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device, positions: int):
        """Creates the cache. ``positions``: number of positions that the model has."""
        super().__init__(layers=[])
        self._last = positions - 1
        self.lengths = torch.tensor(lengths, device=device)
        """Length of each prompt; after ``start``, of each row's prompt."""
        self.width, self.shortest = max(lengths), min(lengths)
        self.filled = 0
        self.places: Tensor | None = torch.empty(0, dtype=torch.int64)
        """Prompts of the running prefill pass; None while rows decode."""
        self._longest = 0
        self.layers_held: dict[int, tuple[Tensor, Tensor]] = {}

    # What transformers asks of a cache.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.filled

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.filled + query_length, 0

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        return []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.places is not None:
            if layer_idx not in self.layers_held:
                # Zeros: what is hidden by a mask is multiplied by a probability of exactly 0, which NaN would survive.
                sizes = [(len(self.lengths), new.shape[1], self.width, new.shape[3]) for new in (key_states, value_states)]
                self.layers_held[layer_idx] = key_states.new_zeros(sizes[0]), value_states.new_zeros(sizes[1])
            for held, new in zip(self.layers_held[layer_idx], (key_states, value_states), strict=True):
                held[self.places, :, : new.shape[2]] = new
            return key_states, value_states
        keys, values = self.layers_held[layer_idx]
        keys.select(2, self.filled).copy_(key_states.squeeze(2))
        values.select(2, self.filled).copy_(value_states.squeeze(2))
        return keys[:, :, : self.filled + 1], values[:, :, : self.filled + 1]

    # A batch: prefill, start, steps, keep.

    def start(self, prompt_of_row: Tensor, longest: int) -> None:
        if not self.layers_held:
            raise ValueError("it keeps no keys and values")
        self.places, self._longest = None, longest
        self.lengths, self.filled = self.lengths[prompt_of_row], self.width
        self.shortest = int(self.lengths.min())
        self._hold(prompt_of_row, self.width + min(longest, FIRST_ROOM))

    def advance(self) -> None:
        """Ends a step: its keys and values count from now on, and there is room for the next."""
        self.filled += 1
        slots = next(iter(self.layers_held.values()))[0].shape[2]
        if self.filled == slots < self.width + self._longest:
            self._hold(None, self.width + min(self._longest, 2 * (slots - self.width)))

    def keep(self, rows: Tensor) -> None:
        self.lengths = self.lengths[rows]
        if self.lengths.device.type == "cpu":  # another device would be waited for, to save a mask
            self.shortest = int(self.lengths.min())
        self._hold(rows, next(iter(self.layers_held.values()))[0].shape[2])

    def _hold(self, rows: Tensor | None, slots: int) -> None:
        for layer, pair in self.layers_held.items():
            grown = []
            for old in pair:
                filled = old[:, :, : self.filled] if rows is None else old[rows, :, : self.filled]
                new = filled.new_empty(*filled.shape[:2], slots, filled.shape[3])
                new[:, :, : self.filled] = filled
                grown.append(new)
            self.layers_held[layer] = grown[0], grown[1]

    @property
    def positions(self) -> Tensor:
        """``[B, 1]``: position of the token that each row appends next. Finished rows that are still computed stay at the last."""
        return (self.lengths + self.filled - self.width)[:, None].clamp(max=self._last)

    def seen(self, window: int | None = None) -> Tensor | None:
        """Returns ``[B, 1, 1, slots]`` bool: the slots that a row's next token sees; None: all."""
        if window is None and self.shortest == self.width:
            return None
        slot = torch.arange(self.filled + 1, device=self.lengths.device)
        lengths = self.lengths[:, None]
        mask = (slot < lengths) | (slot >= self.width)
        if window is not None:
            position = torch.where(slot < self.width, slot, slot - self.width + lengths)
            mask = mask & (position > self.positions - window)
        return mask[:, None, None, :]


def cache_name(model: Any) -> str:
    """Returns how a model calls its cache: transformers 5.24 has one name for all, before it there were two."""
    takes = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "cache_params") if name in takes), "past_key_values")


class PlainDecoder:
    """The model's own modules over a ``RowCache``: for models whose attention takes a mask and whose state is keys and values.

    It is compared with the model's own forward before it is used (``engines/plain_path.py``).
    """

    ragged = True

    def __init__(self, model: Any, head: Head | None, autocast: torch.dtype | None = None):
        if head is None:
            raise ValueError("its head is more than a matrix product")
        self.model, self.head, self._autocast = model, head, autocast
        self._decoder, self._device = decoder_of(model), next(model.parameters()).device
        self._cache_name = cache_name(self._decoder)
        config = model.config.get_text_config()
        self._window = getattr(config, "sliding_window", None)
        self._kinds = set(getattr(config, "layer_types", None) or ())

    def refresh(self) -> None:
        torch.clear_autocast_cache()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        cache = self.cache = RowCache([len(prompt) for prompt in prompts], self._device, context_length(self.model))
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        logits: Tensor | None = None
        while order:
            width = len(prompts[order[0]])
            count = max(1, PREFILL_TOKENS // width)
            part, order = order[:count], order[count:]
            cache.places = places = torch.tensor(part, device=self._device)
            ids = torch.tensor([[*prompts[i], *[0] * (width - len(prompts[i]))] for i in part], device=self._device)
            hidden = self._begin([prompts[i] for i in part], ids, part)
            last = hidden[torch.arange(len(part), device=self._device), cache.lengths[places] - 1]
            part_logits = self.head(last, self._autocast)
            logits = part_logits.new_empty(len(prompts), part_logits.shape[-1]) if logits is None else logits
            logits[places] = part_logits
        assert logits is not None
        return logits

    def _begin(self, prompts: Sequence[Sequence[int]], ids: Tensor, numbers: Sequence[int]) -> Tensor:
        """Returns ``[b, W, H]`` hidden states of some prompts, whose keys and values go into the cache.

        Args:
            ids: ``[b, W]``, right-padded.
            numbers: of these prompts among all.
        """
        states: Tensor = self._decoder(input_ids=ids, **{self._cache_name: self.cache}, use_cache=True).last_hidden_state
        return states

    @property
    def _positions(self) -> Tensor:
        return self.cache.positions

    def start(self, prompt_of_row: Tensor, longest: int) -> None:
        self.cache.start(prompt_of_row, longest)

    def step(self, tokens: Tensor) -> Tensor:
        hidden = self._decoder(
            input_ids=tokens[:, None],
            position_ids=self._positions,
            attention_mask=self._mask(),
            **{self._cache_name: self.cache},
            use_cache=True,
        ).last_hidden_state
        self.cache.advance()
        return self.head(hidden[:, 0], self._autocast)

    def _mask(self) -> Any:
        """Returns the mask as models accept it: one, or one for each kind of layer."""
        if self._window is None or not self._kinds:
            return self._seen(self._window)
        windows = {"full_attention": None, "sliding_attention": self._window}
        return {kind: self._seen(windows[kind]) for kind in self._kinds}

    def _seen(self, window: int | None) -> Tensor | None:
        mask = self.cache.seen(window)
        if mask is None or self.model.config.get_text_config()._attn_implementation != "eager":
            return mask
        dtype = next(self.model.parameters()).dtype  # eager attention adds its mask to the scores
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)

    def keep(self, rows: Tensor) -> None:
        self.cache.keep(rows)


class GenericDecoder:
    """Decoder for any causal language model with a transformers cache of its own. Prompts must be equally long, so that nothing
    is padded: recurrent layers and unusual masks do not work with padding.
    """

    ragged = False

    def __init__(self, model: Any, positions: bool = True):
        """Creates the decoder. ``positions``: pass them to a model that accepts them. Some models count them wrongly, some not
        from 0.
        """
        self.model, self._device = model, next(model.parameters()).device
        takes, self._cache_name = inspect.signature(model.forward).parameters, cache_name(model)
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._positions = positions and "position_ids" in takes

    def refresh(self) -> None:
        torch.clear_autocast_cache()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        self._prompts, self._length = torch.tensor(prompts, device=self._device), 0
        return self._forward(self._prompts, None)

    def _forward(self, ids: Tensor, cache: Cache | None, first: Mapping[str, Any] | None = None) -> Tensor:
        start, self._length = self._length, self._length + ids.shape[1]
        places = self._positions_of(torch.arange(start, self._length, device=self._device).expand_as(ids))
        positions = {"position_ids": places} if self._positions else {}
        inputs = {self._cache_name: cache} | self._last | positions | dict(first or {})
        out = self.model(**({"input_ids": ids} | inputs), use_cache=True)
        self._cache = out.get(self._cache_name)
        if not isinstance(self._cache, Cache):
            raise UserError(f"{type(self.model).__name__} returns no key-value cache, so it cannot generate")
        return out.logits[:, -1]

    def _positions_of(self, counted: Tensor) -> Tensor:
        """Returns the positions of tokens, which are counted from the beginning of their rows."""
        return counted

    def start(self, prompt_of_row: Tensor, longest: int) -> None:
        self.keep(prompt_of_row)

    def step(self, tokens: Tensor) -> Tensor:
        return self._forward(tokens[:, None], self._cache)

    def keep(self, rows: Tensor) -> None:
        assert self._cache is not None
        self._cache.reorder_cache(rows)


class RepeatingDecoder(GenericDecoder):
    """Decoder for caches whose rows cannot be selected: each row computes its prompt, and finished rows are computed to the
    end.
    """

    def start(self, prompt_of_row: Tensor, longest: int) -> None:
        self._length, self._rows = 0, torch.arange(len(prompt_of_row), device=self._device)
        self._tokens = torch.zeros_like(self._rows)
        self._forward(self._prompts[prompt_of_row], None)

    def step(self, tokens: Tensor) -> Tensor:
        self._tokens[self._rows] = tokens
        return self._forward(self._tokens[:, None], self._cache)[self._rows]

    def keep(self, rows: Tensor) -> None:
        self._rows = self._rows[rows]
