"""Rows of a batch while it decodes: drawn tokens, where each row ends, and which rows go on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf_host.engines.requests import Request
from rlhf_host.engines.sampling import Sampler
from rlhf_host.records.episodes import Generation, SampleKey
from rlhf_host.records.numbers import Numbers
from rlhf_host.records.pictures import shown_in, with_images

BLOCK = 64
"""Number of uniforms made at a time: those of tokens ``[block * BLOCK, (block + 1) * BLOCK)``."""


class OpenRows:
    """One row for each request; rows of one prompt are adjacent. Finished rows leave through ``compact``.

    Args:
        requests: by their number in the wave.
        end_tokens: end a row, beside its own stop tokens.
        device: device on which tokens are drawn.
    """

    def __init__(self, requests: Mapping[int, Request], end_tokens: Iterable[int], tokenizer: Any, device: torch.device):
        self.device, self._tokenizer = device, tokenizer
        places = {ids: place for place, ids in enumerate(dict.fromkeys(one.token_ids for one in requests.values()))}
        self.prompts = list(places)
        self._numbers = sorted(requests, key=lambda number: places[requests[number].token_ids])
        self._row_of = {number: row for row, number in enumerate(self._numbers)}
        self._requests = rows = [requests[number] for number in self._numbers]
        self.prompt_of_row = torch.tensor([places[row.token_ids] for row in rows], device=device)
        limits = [row.sampling.max_new_tokens for row in rows]
        self.longest = max(limits)
        """New tokens of the row with the highest limit."""

        # Of all rows.
        self._tokens = torch.zeros(len(rows), self.longest, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(len(rows), self.longest, device=device)
        self._versions: list[int] = []
        self._texts = {row: request.sampling.stop for row, request in enumerate(rows) if request.sampling.stop}
        self.length = 0
        """Number of tokens drawn so far."""

        # Of the rows that are still computed, the same place in each of them.
        self._sampler = Sampler([row.sampling for row in rows], device)
        ends = [torch.tensor([*end_tokens, *row.sampling.stop_token_ids], dtype=torch.int64) for row in rows]
        self._stops = pad_sequence(ends, batch_first=True, padding_value=-1).to(device)
        self._limits = torch.tensor(limits, device=device)
        self._here = torch.arange(len(rows), device=device)
        self._alive = torch.ones(len(rows), dtype=torch.bool, device=device)
        self._uniforms = torch.empty(0)
        self.drawn = torch.empty(0)
        """Last token of each row."""
        self.places = list(range(len(rows)))
        self.left = len(rows)
        """Number of unfinished rows."""

    def draw(self, logits: Tensor, version: int) -> list[int]:
        """Draws a token for every row. Returns the numbers of requests whose logits are not finite: their rows end."""
        place = self.length
        if place % BLOCK == 0:
            keys = [self._requests[row].key for row in self.places]
            self._uniforms = torch.from_numpy(uniform_block(keys, place // BLOCK)).to(self.device)
        self.drawn, logprobs = self._sampler.draw(logits, self._uniforms[:, place % BLOCK])
        self._versions.append(version)
        self._tokens[self._here, place] = self.drawn
        self._logprobs[self._here, place] = logprobs
        self.length += 1
        broken = self._alive & ~logprobs.isfinite()
        if not bool(broken.any()):
            return []
        self._alive &= ~broken
        return [self._numbers[row] for row in self._here[broken].tolist()]

    def finish(self) -> list[tuple[int, Generation]]:
        """Returns the requests that the last token ended, by their number, with their answers."""
        stopped = (self.drawn[:, None] == self._stops).any(-1)
        if self._texts:
            stopped |= self._text_stops().to(self.device)
        ended = (stopped | (self._limits == self.length)) & self._alive
        if not bool(ended.any()):
            return []
        finished = self._here[ended]
        tokens, logprobs = self._tokens[finished, : self.length], self._logprobs[finished, : self.length]
        columns = (column.tolist() for column in (finished, stopped[ended], tokens, logprobs))
        answers = []
        for row, stop, ids, values in zip(*columns, strict=True):
            per_token = Numbers("i", ids), Numbers("f", values), Numbers("i", self._versions)
            answers.append((self._numbers[row], Generation(*per_token, "stop" if stop else "length")))
        self._alive &= ~ended
        return answers

    def drop(self, numbers: Iterable[int]) -> None:
        """Ends the rows of requests that nobody waits for."""
        dropped = {self._row_of[number] for number in numbers if number in self._row_of}
        self._alive &= torch.tensor([row not in dropped for row in self.places], device=self.device)

    def compact(self) -> Tensor | None:
        """Counts the rows that go on, and leaves out the others if there are enough of them. Returns the places of the rows
        that are kept; None: all.
        """
        self.left = int(self._alive.sum())
        # Copying the cache costs about a step's attention: worth it only for several rows at a time.
        if not self.left or self.left > len(self.places) - max(1, len(self.places) // 8):
            return None
        kept = self._alive.nonzero()[:, 0]
        self._sampler.keep(kept)
        self.drawn, self._here, self._alive = self.drawn[kept], self._here[kept], self._alive[kept]
        self._stops, self._limits, self._uniforms = self._stops[kept], self._limits[kept], self._uniforms[kept]
        self.places = self._here.tolist()
        return kept

    def so_far(self) -> list[Sequence[int]]:
        """Returns prompt and drawn tokens of every row that is still computed."""
        drawn = self._tokens[self._here, : self.length].tolist()
        prompts = [self._requests[row].token_ids for row in self.places]
        return [with_images([*prompt, *ids], shown_in(prompt)) for prompt, ids in zip(prompts, drawn, strict=True)]

    def _text_stops(self) -> Tensor:
        """Returns the rows that end in one of their stop strings. Decodes only the tail that can hold one: a token is at least
        a byte, except the first few, where decoders drop a leading space or half a character.
        """
        hits = []
        for row, going in zip(self.places, self._alive.tolist(), strict=True):
            if not going or row not in self._texts:
                hits.append(False)
                continue
            reach = max(len(text.encode()) for text in self._texts[row]) + 4
            tail_ids = self._tokens[row, max(0, self.length - reach) : self.length].tolist()
            tail = self._tokenizer.decode(tail_ids, skip_special_tokens=False)
            hits.append(any(text in tail for text in self._texts[row]))
        return torch.tensor(hits)


def uniform_block(keys: Sequence[SampleKey], block: int) -> np.ndarray:
    """Returns ``[len(keys), BLOCK]`` float64 in [0, 1), 53 random bits each.

    They are SHAKE-128 of the key and the block number: stable across machines, and one hash call per row is cheaper than a
    generator.
    """
    suffix = f"|{block}".encode()
    digests = [hashlib.shake_128(",".join(map(str, key)).encode() + suffix).digest(8 * BLOCK) for key in keys]
    words = np.frombuffer(b"".join(digests), dtype="<u8").reshape(len(keys), BLOCK)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
