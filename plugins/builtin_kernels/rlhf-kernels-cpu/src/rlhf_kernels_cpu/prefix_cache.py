"""Attention for decoding: a prompt's keys and values are kept once for all rows that share it, completions apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

COPIED = 64
"""Number of tokens up to which a prompt's keys and values are copied to its rows: one product of twice the size costs less than
two.
"""
ROOM = 64
"""Number of tokens of a completion for which there is room at first; it doubles."""


class PrefixCache:
    """Keys and values of ``G`` prompts and of ``B`` completions that begin with one of them.

    Prompts are right-padded: ``prefix[layer]`` is ``[G, kv, P, D]`` with ``prompt_lens`` real tokens each. Every completion
    starts at slot ``before`` of ``suffix[layer]``, ``[B, kv, before + capacity, D]``, of which ``length`` are filled; before
    it lies a copy of short prompts, nothing else. Nothing is padded on the left, so decoding needs a mask only over ragged
    prompts and beyond a sliding window.
    """

    def __init__(self, prompt_lens: list[int]) -> None:
        self.width = max(prompt_lens)
        self.ragged = min(prompt_lens) < self.width
        self.prompt_lens = torch.tensor(prompt_lens)
        self.prefix: dict[int, tuple[Tensor, Tensor]] = {}
        self.suffix: dict[int, tuple[Tensor, Tensor]] = {}
        self.flat: dict[int, tuple[Tensor, Tensor]] = {}
        """``suffix`` as products read it: keys ``[B · kv, D, places]``, values ``[B · kv, places, D]``."""
        self.length = 0
        self.before = 0
        self.capacity = 0
        self.longest = 0
        self.groups = torch.arange(len(prompt_lens))
        self.per_group = 1
        self.slot: Tensor | None = None
        self._masks: dict[int | None, Tensor | None] = {}

    def hold_prompts(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores ``keys`` and ``values`` ``[len(places), kv, T, D]`` of the prompts of these numbers."""
        if layer not in self.prefix:
            # Zeros, not empty: padding is multiplied by a probability of exactly 0, which NaN would survive.
            self.prefix[layer] = tuple(_room(one, len(self.prompt_lens), self.width).zero_() for one in (keys, values))
        for held, new in zip(self.prefix[layer], (keys, values), strict=True):
            held[places, :, : new.shape[2]] = new

    def start(self, groups: Tensor, longest: int) -> None:
        """Starts decoding rows with the prompts ``groups`` ``[B]`` (sorted), at most ``longest`` tokens each."""
        self.longest = longest
        self.capacity = min(longest, ROOM)
        self.before = self.width if self.width <= COPIED else 0
        for layer, pair in self.prefix.items():
            room = [_room(one, len(groups), self.before + self.capacity) for one in pair]
            if self.before:
                for fresh, prompts in zip(room, pair, strict=True):
                    fresh[:, :, : self.before] = prompts[groups]
            self._hold(layer, room[0], room[1])
        if self.before:
            self.prefix.clear()
        self._set_groups(groups)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Appends one token's ``[B, kv, 1, D]``."""
        for held, new in zip(self.suffix[layer], (keys, values), strict=True):
            held.select(2, self.before + self.length).copy_(new.squeeze(2))

    def advance(self) -> None:
        """Ends a step: its keys and values count from now on, and there is room for the next."""
        self.length += 1
        self._masks = {window: mask for window, mask in self._masks.items() if window is None}
        if self.length == self.capacity and self.length < self.longest:
            self.capacity = min(self.longest, 2 * self.capacity)
            self._refill(None)

    def keep(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (sorted); prompts without rows are dropped."""
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
                new = _room(old, len(filled), self.before + self.capacity)
                new[:, :, : self.before + self.length] = filled
                fresh.append(new)
            self._hold(layer, fresh[0], fresh[1])

    def _hold(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.suffix[layer] = keys, values
        self.flat[layer] = keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1)

    def _set_groups(self, groups: Tensor) -> None:
        """Sets the groups. Rows of a group are adjacent: row ``i`` is number ``slot[i]`` in a ``[G, per_group]`` grid, perhaps
        with holes.
        """
        self.groups = groups
        counts = torch.bincount(groups, minlength=len(self.prompt_lens))
        self.per_group = int(counts.max())
        first = counts.cumsum(0) - counts
        full = self.per_group * len(counts) == len(groups)
        within = torch.arange(len(groups)) - first[groups]
        self.slot = None if full else groups * self.per_group + within
        self._masks.clear()

    def hidden(self, window: int | None) -> Tensor | None:
        """Returns ``[B, 1, 1, P]`` bool, True where the prompt is hidden from the current position; None: nowhere."""
        if window is not None and self.width + self.length < window:
            window = None
        if window is None and not self.ragged:
            return None
        if window not in self._masks:
            position = torch.arange(self.width)
            lens = self.prompt_lens[:, None]
            hidden = position >= lens
            if window is not None:
                hidden = hidden | (position <= lens + self.length - window)
            self._masks[window] = hidden[self.groups][:, None, None, :]
        return self._masks[window]


def attend_prompts(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Computes attention. ``query`` ``[G, heads, T, D]``, scaled, ``key`` and ``value`` ``[G, kv, T, D]`` → ``[G, T, heads,
    D]``; causal.
    """
    length = query.shape[2]
    mask = None
    if window is not None and length > window:
        distance = torch.arange(length)[:, None] - torch.arange(length)
        mask = (distance >= 0) & (distance < window)
    grouped = query.shape[1] > key.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=1.0, enable_gqa=grouped
    )
    return out.transpose(1, 2)


def attend_next(cache: PrefixCache, layer: int, query: Tensor, window: int | None) -> Tensor:
    """Computes attention. ``query`` ``[B, heads, 1, D]``, scaled, of the token appended last → ``[B, 1, heads, D]``."""
    own_keys, own_values = cache.flat[layer]
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
        weights = _softmax(scores, kv, None if begin else cache.hidden(window), width)
        return torch.bmm(weights, own_values.narrow(1, first, places)).view(rows, 1, heads, depth)

    prefix_keys, prefix_values = cache.prefix[layer]
    own = torch.bmm(query, own_keys.narrow(2, begin, end - begin))
    query = query.view(rows, kv, groups, -1)
    shared = torch.bmm(_to_prompts(cache, query), prefix_keys.flatten(0, 1).transpose(1, 2))
    scores = torch.cat([_to_rows(cache, shared, kv, groups), own.view(rows, kv, groups, -1)], -1).flatten(0, 1)
    weights = _softmax(scores, kv, cache.hidden(window), width).view(rows, kv, groups, -1)

    attended = torch.bmm(_to_prompts(cache, weights[..., :width]), prefix_values.flatten(0, 1))
    new = torch.bmm(weights[..., width:].flatten(0, 1), own_values.narrow(1, begin, end - begin))
    out = new.view(rows, kv, groups, depth).add_(_to_rows(cache, attended, kv, groups))
    return out.reshape(rows, 1, heads, depth)


def _softmax(scores: Tensor, kv: int, hidden: Tensor | None, width: int) -> Tensor:
    """Computes the softmax over the last dimension of ``[B · kv, g, places]``, whose first ``width`` are the prompt's."""
    if hidden is not None:
        scores.unflatten(0, (-1, kv))[..., :width].masked_fill_(hidden, -torch.inf)
    return scores.softmax(-1)


def _to_prompts(cache: PrefixCache, rows: Tensor) -> Tensor:
    """Converts ``[B, kv, g, X]`` to ``[G * kv, per_group * g, X]``: all rows of a prompt side by side, for a single product."""
    _, kv, groups, size = rows.shape
    if cache.slot is not None:
        grid = rows.new_zeros(len(cache.prompt_lens) * cache.per_group, kv, groups, size)
        rows = grid.index_copy_(0, cache.slot, rows)
    if cache.per_group == 1:
        return rows.reshape(-1, groups, size)
    grid = rows.view(-1, cache.per_group, kv, groups, size).transpose(1, 2)
    return grid.reshape(-1, cache.per_group * groups, size)


def _to_rows(cache: PrefixCache, prompts: Tensor, kv: int, groups: int) -> Tensor:
    """Reverses this: ``[G * kv, per_group * g, X]`` → ``[B, kv, g, X]``."""
    size = prompts.shape[-1]
    if cache.per_group == 1:
        rows = prompts.view(-1, kv, groups, size)
    else:
        rows = prompts.view(-1, kv, cache.per_group, groups, size).transpose(1, 2).reshape(-1, kv, groups, size)
    return rows if cache.slot is None else rows[cache.slot]


def _room(like: Tensor, rows: int, length: int) -> Tensor:
    return like.new_empty(rows, like.shape[1], length, like.shape[3])
