"""Attention for decoding: a prompt's keys and values are kept once for all rows that share it, completions apart."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, Cache

COPIED = 64
"""Tokens up to which a prompt's keys and values are copied to its rows: one product of twice the size costs less than two."""

NAME = "rlhf_host_shared_prefix"
"""Registered for attention only. Without a mask function of that name transformers builds no masks."""

_active = threading.local()


class Unsupported(Exception):
    """The model needs something this attention does not have."""


class SharedPrefixCache(Cache):
    """Keys and values of ``G`` prompts and of ``B`` completions that begin with one of them.

    Prompts are right-padded: ``prefix[layer]`` is ``[G, kv, P, D]`` with ``prompt_lens`` real tokens each. Every completion
    starts at slot ``before`` of ``suffix[layer]``, ``[B, kv, before + capacity, D]``, of which ``length`` are filled; before
    it lies a copy of short prompts, nothing else. Nothing is padded on the left, so decoding needs a mask only over ragged
    prompts and beyond a sliding window.
    """

    def __init__(self, prompt_lens: list[int], device: torch.device, dtype: torch.dtype | None, softcaps: bool, copies: bool):
        super().__init__(layers=[])
        self.copies = copies
        self.softcaps = softcaps
        self.device, self.dtype = device, dtype
        self.width = max(prompt_lens)
        self.ragged = min(prompt_lens) < self.width
        self.prompt_lens = torch.tensor(prompt_lens, device=device)
        self.prefix: dict[int, tuple[Tensor, Tensor]] = {}
        self.suffix: dict[int, tuple[Tensor, Tensor]] = {}
        self.flat: dict[int, tuple[Tensor, Tensor]] = {}
        """``suffix`` as products read it: keys ``[B · kv, D, places]``, values ``[B · kv, places, D]``."""
        self.places = torch.empty(0, dtype=torch.int64, device=device)
        """Which prompts the running prefill pass is about."""
        self.windows: dict[int, int | None] = {}
        """Sliding window each layer asked for."""
        self.prefilling = True
        self.layer = 0
        self.length = 0
        self.before = 0
        self.capacity = 0
        self.longest = 0
        self.groups = torch.arange(len(prompt_lens), device=device)
        self.per_group = 1
        self.slot: Tensor | None = None
        self._masks: dict[int | None, Tensor | None] = {}

    # What transformers asks of a cache.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.prefilling else self.width + self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        return []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store and hand back what came; the attention function reads the rest from here."""
        self.layer = layer_idx
        if self.prefilling:
            if layer_idx not in self.prefix:
                prompts = len(self.prompt_lens)
                # Zeros, not empty: padding is multiplied by a probability of exactly 0, which NaN would survive.
                self.prefix[layer_idx] = (
                    self._room(key_states, prompts, self.width).zero_(),
                    self._room(value_states, prompts, self.width).zero_(),
                )
            keys, values = self.prefix[layer_idx]
            count = key_states.shape[2]
            keys[self.places, :, :count] = key_states.to(keys.dtype)
            values[self.places, :, :count] = value_states.to(values.dtype)
        else:
            keys, values = self.suffix[layer_idx]
            place = self.before + self.length
            keys.select(2, place).copy_(key_states.squeeze(2))
            values.select(2, place).copy_(value_states.squeeze(2))
        return key_states, value_states

    def _room(self, like: Tensor, rows: int, length: int) -> Tensor:
        return torch.empty(rows, like.shape[1], length, like.shape[3], dtype=self.dtype or like.dtype, device=self.device)

    # The life of a wave: prefill, start, steps, keep.

    def start(self, groups: Tensor, longest: int) -> None:
        """Decode rows with the prompts ``groups`` ``[B]`` (sorted), at most ``longest`` tokens each."""
        self.prefilling = False
        self.longest = longest
        self.capacity = min(longest, 64)
        self.before = self.width if self.copies and self.width <= COPIED else 0
        for layer, pair in self.prefix.items():
            room = [self._room(one, len(groups), self.before + self.capacity) for one in pair]
            if self.before:
                for fresh, prompts in zip(room, pair, strict=True):
                    fresh[:, :, : self.before] = prompts[groups]
            self._hold(layer, room[0], room[1])
        if self.before:
            self.prefix.clear()
        self._set_groups(groups)

    def advance(self) -> None:
        """A step is done: its keys and values count, and there is room for the next."""
        self.length += 1
        self._masks = {window: mask for window, mask in self._masks.items() if window is None}
        if self.length == self.capacity and self.length < self.longest:
            self.capacity = min(self.longest, 2 * self.capacity)
            self._refill(None)

    def keep(self, rows: Tensor) -> None:
        """Only ``rows`` (sorted) go on; prompts without rows are dropped."""
        self._refill(rows)
        alive, groups = torch.unique_consecutive(self.groups[rows], return_inverse=True)
        if len(alive) < len(self.prompt_lens):
            self.prompt_lens = self.prompt_lens[alive]
            for layer, (keys, values) in self.prefix.items():
                self.prefix[layer] = keys[alive], values[alive]
        self._set_groups(groups)

    def _refill(self, rows: Tensor | None) -> None:
        for layer, pair in self.suffix.items():
            fresh = []
            for old in pair:
                filled = old[:, :, : self.before + self.length]
                filled = filled if rows is None else filled[rows]
                new = self._room(old, len(filled), self.before + self.capacity)
                new[:, :, : self.before + self.length] = filled
                fresh.append(new)
            self._hold(layer, fresh[0], fresh[1])

    def _hold(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.suffix[layer] = keys, values
        self.flat[layer] = keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1)

    def _set_groups(self, groups: Tensor) -> None:
        """Rows of a group stand together: row ``i`` is number ``slot[i]`` in a ``[G, per_group]`` grid, perhaps with holes."""
        self.groups = groups
        counts = torch.bincount(groups, minlength=len(self.prompt_lens))
        self.per_group = int(counts.max())
        first = counts.cumsum(0) - counts
        full = self.per_group * len(counts) == len(groups)
        within = torch.arange(len(groups), device=self.device) - first[groups]
        self.slot = None if full else groups * self.per_group + within
        self._masks.clear()

    def hidden(self, window: int | None) -> Tensor | None:
        """``[B, 1, 1, P]`` bool, True where the prompt may not be seen from the current position; ``None``: nowhere."""
        if window is not None and self.width + self.length < window:
            window = None
        if window is None and not self.ragged:
            return None
        if window not in self._masks:
            position = torch.arange(self.width, device=self.device)
            lens = self.prompt_lens[:, None]
            hidden = position >= lens
            if window is not None:
                hidden = hidden | (position <= lens + self.length - window)
            self._masks[window] = hidden[self.groups][:, None, None, :]
        return self._masks[window]


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``query`` ``[B, heads, T, D]``, new ``key`` and ``value`` ``[B, kv, T, D]`` → ``[B, T, heads, D]``. The shape of
    transformers' attention functions; the cache of the wave comes through a thread-local."""
    cache: SharedPrefixCache = _active.cache
    if attention_mask is not None or kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise Unsupported("attention with a mask, sinks or position bias of its own")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap = softcap if cache.softcaps else None
    if cache.dtype is not None and query.dtype != cache.dtype:
        query, key, value = query.to(cache.dtype), key.to(cache.dtype), value.to(cache.dtype)
    if cache.prefilling:
        cache.windows[cache.layer] = sliding_window
        return prefill_attention(query, key, value, scale, sliding_window, softcap), None
    return decode_attention(cache, query, scale, sliding_window, softcap), None


def prefill_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    length = query.shape[2]
    position = torch.arange(length, device=query.device)
    distance = position[:, None] - position[None, :]
    mask = (distance >= 0) & (distance < (window or length + 1))
    groups = query.shape[1] // key.shape[1]
    if softcap is None:
        causal = window is None or length <= window
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=None if causal else mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
        )
        return out.transpose(1, 2)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = softcap * torch.tanh((query @ key.transpose(2, 3)).float() * (scale / softcap))
    weights = scores.masked_fill_(~mask, -torch.inf).softmax(-1).to(value.dtype)
    return (weights @ value).transpose(1, 2)


def decode_attention(
    cache: SharedPrefixCache, query: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    own_keys, own_values = cache.flat[cache.layer]
    rows, heads = query.shape[:2]
    kv, depth = own_keys.shape[0] // rows, own_values.shape[-1]
    groups, width = heads // kv, cache.width
    end = cache.length + 1
    begin = 0 if window is None else max(0, end - window)
    query = query.reshape(rows * kv, groups, -1)
    if cache.before:
        # Where the window begins after the first of the row's own tokens, it has left the whole prompt behind.
        first = cache.before + begin if begin else 0
        places = cache.before + end - first
        scores = torch.bmm(query, own_keys.narrow(2, first, places))
        weights = _softmax(scores, kv, None if begin else cache.hidden(window), width, scale, softcap)
        return torch.bmm(weights.to(query.dtype), own_values.narrow(1, first, places)).view(rows, 1, heads, depth)

    prefix_keys, prefix_values = cache.prefix[cache.layer]
    own = torch.bmm(query, own_keys.narrow(2, begin, end - begin))
    query = query.view(rows, kv, groups, -1)
    shared = torch.bmm(_to_prompts(cache, query), prefix_keys.flatten(0, 1).transpose(1, 2))
    scores = torch.cat([_to_rows(cache, shared, kv, groups), own.view(rows, kv, groups, -1)], -1).flatten(0, 1)
    weights = _softmax(scores, kv, cache.hidden(window), width, scale, softcap).to(query.dtype).view(rows, kv, groups, -1)

    seen = torch.bmm(_to_prompts(cache, weights[..., :width]), prefix_values.flatten(0, 1))
    new = torch.bmm(weights[..., width:].flatten(0, 1), own_values.narrow(1, begin, end - begin))
    out = new.view(rows, kv, groups, depth).add_(_to_rows(cache, seen, kv, groups))
    return out.reshape(rows, 1, heads, depth)


def _softmax(scores: Tensor, kv: int, hidden: Tensor | None, width: int, scale: float, softcap: float | None) -> Tensor:
    """Over the last dimension of ``[B · kv, g, places]``, whose first ``width`` are the prompt's; in float32."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores.float() * (scale / softcap))
    if hidden is not None:
        scores.unflatten(0, (-1, kv))[..., :width].masked_fill_(hidden, -torch.inf)
    if softcap is None and scale != 1:
        scores = scores.float().mul_(scale)
    return scores.softmax(-1, dtype=torch.float32)


def _to_prompts(cache: SharedPrefixCache, rows: Tensor) -> Tensor:
    """``[B, kv, g, X]`` → ``[G * kv, per_group * g, X]``: all rows of a prompt side by side, so one product serves them."""
    _, kv, groups, size = rows.shape
    if cache.slot is not None:
        grid = rows.new_zeros(len(cache.prompt_lens) * cache.per_group, kv, groups, size)
        rows = grid.index_copy_(0, cache.slot, rows)
    if cache.per_group == 1:
        return rows.reshape(-1, groups, size)
    grid = rows.view(-1, cache.per_group, kv, groups, size).transpose(1, 2)
    return grid.reshape(-1, cache.per_group * groups, size)


def _to_rows(cache: SharedPrefixCache, prompts: Tensor, kv: int, groups: int) -> Tensor:
    """The way back: ``[G * kv, per_group * g, X]`` → ``[B, kv, g, X]``."""
    size = prompts.shape[-1]
    if cache.per_group == 1:
        rows = prompts.view(-1, kv, groups, size)
    else:
        rows = prompts.view(-1, kv, cache.per_group, groups, size).transpose(1, 2).reshape(-1, kv, groups, size)
    return rows if cache.slot is None else rows[cache.slot]


class active:
    """``with active(cache):`` the model's attention in this thread uses ``cache``."""

    def __init__(self, cache: SharedPrefixCache):
        self.cache = cache

    def __enter__(self) -> None:
        _active.cache = self.cache

    def __exit__(self, *_: object) -> None:
        del _active.cache


AttentionInterface.register(NAME, attend)
