"""Decoding whose step is captured once for each number of rows and length: the model's own modules over a static cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_host import functional
from rlhf_host.internals import PlainDecoder, context_length, decoder_of, find_head
from rlhf_host.protocols import Use
from rlhf_kernels_graphs.capture import Capture
from rlhf_kernels_graphs.slots import Layers, SlotCache

ROOM = 64
"""Tokens for which a row has room at first; it doubles."""
ROWS = 8
"""The number of rows is rounded up to a multiple of this."""


class GraphDecoder:
    """A ``Decoder`` of fixed rows. Between two looks of the host at a batch, nothing reads the device: tokens, positions and the
    mask are computed on it, and rows that leave keep their slot until half of the slots are free.
    """

    ragged = True

    def __init__(self, model: Any, use: Use, capture: Capture) -> None:
        head = find_head(model)
        if head is None:
            raise ValueError("its head is more than a matrix product")
        self._use, self._capture, self._context = use, capture, context_length(model)
        twin: Any = functional.twin(model).eval()
        self._copies = _narrow(twin, use.autocast)
        self._twin, self._decoder, self._head = twin, decoder_of(twin), replace(head, linear=twin.get_output_embeddings())
        names = inspect.signature(self._decoder.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # the first since transformers 5.24
        self._weights = [*twin.parameters(), *twin.buffers()]
        config = model.config.get_text_config()
        kinds, self._window = getattr(config, "layer_types", None) or (), getattr(config, "sliding_window", None)
        self._kinds = {kind: self._window if kind == "sliding_attention" else None for kind in kinds}
        self._replay: Callable[[], None] | None = None
        self._addresses: list[int] = []
        self._cache: SlotCache | None = None
        self._prompts: Layers = {}
        self._tokens = self._positions = self._logits = torch.empty(0)
        self._lengths: list[int] = []
        self._starts: list[int] = []
        """Per row, the length of its prompt, less the steps before it came in; at least."""
        self._steps = 0

    @torch.no_grad()
    def refresh(self) -> None:
        if self._copies:
            copies, sources = zip(*self._copies, strict=True)
            torch._foreach_copy_(copies, sources)
        torch.clear_autocast_cache()

    # --- prompts --------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        self._forget_moved()
        logits, self._prompts = self._compute(prompts)
        self._lengths = [len(prompt) for prompt in prompts]
        return logits

    def _forget_moved(self) -> None:
        """Drops what was captured if weights have moved: a graph reads where they were."""
        addresses = [weight.data_ptr() for weight in self._weights]
        if addresses != self._addresses:
            self.end()
            self._addresses = addresses

    def _compute(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Layers]:
        """Returns ``[G, V]`` logits after each prompt, and their keys and values."""
        plain = PlainDecoder(self._twin, self._head, self._use.autocast)
        return plain.prefill(prompts), plain.cache.layers_held

    # --- rows -----------------------------------------------------------------------------------

    def start(self, prompt_of_row: Tensor, longest: int) -> None:
        count = len(prompt_of_row)
        self._slots = torch.arange(count, device=self._use.device)
        self._starts, self._steps = [max(self._lengths)] * count, 0
        self._make_room(-(-count // ROWS) * ROWS, self._reach + 1, self._prompts)
        self._positions.zero_()
        self._fill(self._prompts, self._lengths, prompt_of_row, self._slots)

    def refill(self, prompts: Sequence[Sequence[int]], prompt_of_row: Tensor, rows: Tensor) -> Tensor:
        logits, layers = self._compute(prompts)
        lengths, owners = [len(prompt) for prompt in prompts], prompt_of_row.to(self._use.device)
        for row, owner in zip(rows.tolist(), prompt_of_row.tolist(), strict=True):
            self._starts[row] = lengths[owner] - self._steps
        self._grow()
        self._fill(layers, lengths, owners, self._slots[rows.to(self._use.device)])
        return logits[owners]

    @property
    def _reach(self) -> int:
        """The position of the next token of the longest row, at most."""
        return max(self._starts) + self._steps

    def _fill(self, prompts: Layers, lengths: Sequence[int], owners: Tensor, slots: Tensor) -> None:
        assert self._cache is not None
        self._cache.take(prompts, owners, slots)
        self._positions[slots] = torch.tensor(lengths, device=self._use.device)[owners]

    def _make_room(self, rows: int, length: int, like: Layers) -> None:
        """Provides a cache for so many rows of this length, as it was if it is large enough."""
        room = ROOM
        while room < length:
            room *= 2
        room = min(room, self._context)
        cache, device = self._cache, self._use.device
        if cache is None or (cache.rows, cache.room) != (rows, room):
            if cache is None or cache.rows != rows:
                self._tokens, self._positions = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
            self._cache = SlotCache(rows, room, like, self._positions, self._use.autocast)
            self._replay = None

    def _grow(self) -> None:
        """Doubles the room of each row if the next token has none."""
        cache = self._cache
        assert cache is not None
        if cache.room <= self._reach < self._context:
            self._make_room(cache.rows, self._reach + 1, cache.layers_held)
            assert self._cache is not None
            every = torch.arange(cache.rows, device=self._use.device)
            self._cache.take(cache.layers_held, every, every)

    def keep(self, rows: Tensor) -> None:
        self._slots, self._starts = self._slots[rows], [max(self._starts)] * len(rows)
        cache, count = self._cache, -(-len(rows) // ROWS) * ROWS
        assert cache is not None
        if count <= cache.rows // 2:
            positions, kept = self._positions[self._slots], self._slots
            self._make_room(count, cache.room, cache.layers_held)
            assert self._cache is not None
            self._slots = torch.arange(len(rows), device=self._use.device)
            self._cache.take(cache.layers_held, kept, self._slots)
            self._positions[self._slots] = positions

    def end(self) -> None:
        self._replay = None
        self._cache, self._prompts = None, {}
        self._tokens = self._positions = self._logits = torch.empty(0)

    # --- a step ---------------------------------------------------------------------------------

    def step(self, tokens: Tensor) -> Tensor:
        self._grow()
        self._tokens[self._slots] = tokens
        assert self._cache is not None
        if self._replay is None:
            before = self._positions.clone()
            self._step()
            self._replay = self._capture(self._step)
            self._positions.copy_(before)
        self._replay()
        self._steps += 1
        return self._logits[self._slots]

    def _step(self) -> None:
        """One token of each row, from tensors that stay where they are to others: what is captured."""
        cache = self._cache
        assert cache is not None
        # Rows that ended go on until others take their places, and stay within the cache.
        self._positions.clamp_(max=cache.room - 1)
        seen = {kind: cache.seen(window) for kind, window in self._kinds.items()}
        # Weights are cast before, and a cast that is kept would be one of the graph's own memory.
        with torch.autocast(
            self._use.device.type, self._use.autocast, enabled=self._use.autocast is not None, cache_enabled=False
        ):
            hidden = self._decoder(
                input_ids=self._tokens[:, None],
                position_ids=self._positions[:, None],
                attention_mask=seen or cache.seen(self._window),
                **{self._cache_name: cache},
                use_cache=True,
            ).last_hidden_state
            logits = self._head(hidden[:, 0], self._use.autocast)
        if self._logits.shape != logits.shape:
            self._logits = torch.empty_like(logits)
        self._logits.copy_(logits)
        self._positions.add_(1)


def _narrow(twin: nn.Module, dtype: torch.dtype | None) -> list[tuple[Tensor, Tensor]]:
    """Gives linear layers copies of their weights in ``dtype``, in place of a cast in every step. Returns copies and sources."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for module in twin.modules() if dtype is not None else ():
        for name, weight in list(module._parameters.items()) if type(module) is nn.Linear else ():
            if weight is not None and weight.dtype != dtype:
                copy = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
                module._parameters[name] = copy
                pairs.append((copy.data, weight))
    return pairs
