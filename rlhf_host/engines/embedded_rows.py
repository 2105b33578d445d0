"""Rows of a batch while it decodes: drawn tokens, where each row ends, which rows go on, and which come in."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rlhf_host.engines.requests import Request
from rlhf_host.engines.sampling import Sampler
from rlhf_host.errors import RunError
from rlhf_host.records.episodes import Generation, SampleKey
from rlhf_host.records.numbers import Numbers
from rlhf_host.records.pictures import shown_in, with_images
from rlhf_host.records.token_sets import pack_tokens, support_trace

BLOCK = 64
"""Number of uniforms made at a time: those of tokens ``[block * BLOCK, (block + 1) * BLOCK)``."""
LOOK = 8
"""Number of tokens drawn between two looks at a device, which wait for it. A look at a CPU costs nothing, so it is at each."""


class OpenRows:
    """One row for each request; rows of one prompt are adjacent. The host looks at drawn tokens every few steps: a row ends at
    the first token that ends it, and what was drawn after that is dropped. Finished rows leave through ``compact``, or waiting
    requests take their places through ``admit``.

    Args:
        requests: by their number in the wave.
        end_tokens: end a row, beside its own stop tokens.
        device: device on which tokens are drawn.
        most: number of rows at a time; further requests wait. 0: all at once.
    """

    def __init__(
        self, requests: Mapping[int, Request], end_tokens: Iterable[int], tokenizer: Any, device: torch.device, most: int = 0
    ):
        self.device, self._tokenizer, self._ends, self._every = device, tokenizer, [*end_tokens], look_every(device)
        places = {ids: place for place, ids in enumerate(dict.fromkeys(one.token_ids for one in requests.values()))}
        numbers = sorted(requests, key=lambda number: places[requests[number].token_ids])
        self._texts = any(one.sampling.stop for one in requests.values())
        self._all, self.waiting = requests, deque(numbers[most:] if most else ())
        self.longest = max(one.sampling.max_new_tokens for one in requests.values())
        """New tokens of the request with the highest limit."""
        self._versions: list[int] = []
        """Of the weights that drew each token so far."""
        self._unseen: list[tuple[Tensor, Tensor]] = []
        """Tokens and log-probabilities since the last look."""
        self._supports: list[Tensor] = []
        """``[B, V]`` bool: the tokens that could be drawn, since the last look."""
        self.sampled = 0
        """Number of tokens of answers so far."""

        # Of the rows that are computed, by place.
        self._numbers = numbers[: most or None]
        count, stops = len(self._numbers), max(len(one.sampling.stop_token_ids) for one in requests.values())
        self._begun, self._limits, self._block = (np.zeros(count, np.int64) for _ in range(3))
        self._alive = np.zeros(count, np.bool_)
        self._stops = np.full((count, len(self._ends) + stops), -1)
        self._tokens = np.zeros((count, self.longest + self._every), np.int64)
        self._logprobs = np.zeros(self._tokens.shape, np.float32)
        self._uniforms = np.zeros((count, BLOCK))
        self._sets: list[list[bytes]] = [[] for _ in self._numbers]
        self.prompts, owners = self._open(range(count))
        self.prompt_of_row = owners.to(device)
        self._next_uniforms = self.drawn = torch.empty(0)
        """Last token of each row."""

    def _open(self, places: Iterable[int]) -> tuple[list[tuple[int, ...]], Tensor]:
        """Begins the rows at these places. Returns their distinct prompts, and which of them each row has."""
        for place in places:
            sampling = self._all[self._numbers[place]].sampling
            self._begun[place], self._block[place] = len(self._versions), -1
            self._alive[place], self._limits[place] = True, sampling.max_new_tokens
            self._stops[place], self._sets[place] = -1, []
            self._stops[place, : len(self._ends) + len(sampling.stop_token_ids)] = [*self._ends, *sampling.stop_token_ids]
        self._count()
        self._sampler = Sampler([self._all[number].sampling for number in self._numbers], self.device)
        prompts = [self._all[self._numbers[place]].token_ids for place in places]
        numbers = {ids: number for number, ids in enumerate(dict.fromkeys(prompts))}
        return list(numbers), torch.tensor([numbers[ids] for ids in prompts])

    def _count(self) -> None:
        """Counts the rows that go on."""
        self.left = int(self._alive.sum())
        self._end = int((self._begun + self._limits)[self._alive].max(initial=0))
        self._several = max(1, len(self._alive) // 8)

    @property
    def due(self) -> bool:
        """True if it is time to look."""
        return len(self._unseen) == self._every or len(self._versions) == self._end

    def draw(self, logits: Tensor, version: int) -> None:
        """Draws a token for every row."""
        if not self._unseen:
            self._next_uniforms = torch.from_numpy(self._make_uniforms()).to(self.device, non_blocking=True)
        self.drawn, logprobs = self._sampler.draw(logits, self._next_uniforms[:, len(self._unseen)])
        self._unseen.append((self.drawn, logprobs))
        self._supports += [self._sampler.support] if self._sampler.tells else []
        self._versions.append(version)

    def _make_uniforms(self) -> np.ndarray:
        """Returns ``[B, steps to the next look]``."""
        columns = []
        for step in range(len(self._versions), len(self._versions) + self._every):
            block, at = np.divmod(step - self._begun, BLOCK)
            for number in np.unique(block[block != self._block]):
                stale = (block == number).nonzero()[0]
                keys = [self._all[self._numbers[place]].key for place in stale]
                self._uniforms[stale] = uniform_block(keys, int(number))
            self._block = block
            columns.append(self._uniforms[np.arange(len(at)), at])
        return np.stack(columns, 1)

    def look(self) -> list[tuple[int, Generation | Exception]]:
        """Reads what was drawn since the last look. Returns the requests that it ended, by their number, with their answers; for
        those whose logits are not finite, an error.
        """
        pairs = torch.stack([one.double() for pair in self._unseen for one in pair]).cpu().numpy()  # the one wait
        count, rows = len(self._unseen), self._alive.nonzero()[0]
        self._unseen.clear()
        while self._supports:
            at, ids = (each.cpu().numpy() for each in self._supports.pop(0).nonzero(as_tuple=True))
            for own, one in zip(self._sets, np.split(ids, np.searchsorted(at, range(1, len(self._sets)))), strict=True):
                own.append(pack_tokens(one) if len(one) else b"")  # where logits are not finite there is none
        tokens, logprobs = pairs[0::2, rows].T.astype(np.int64), pairs[1::2, rows].T.astype(np.float32)
        at = (len(self._versions) - count - self._begun[rows])[:, None] + np.arange(count)
        self._tokens[rows[:, None], at], self._logprobs[rows[:, None], at] = tokens, logprobs
        broken = ~np.isfinite(logprobs)
        stopped = (tokens[:, :, None] == self._stops[rows, None]).any(-1)
        if self._texts:
            stopped |= self._text_stops(rows, at)
        ending = broken | stopped | (at + 1 == self._limits[rows, None])
        ended, first = ending.any(1), ending.argmax(1)
        self.sampled += int(np.where(ended, first + 1, count).sum())
        answers: list[tuple[int, Generation | Exception]] = []
        for row in ended.nonzero()[0]:
            place, last = rows[row], first[row]
            length, begun = int(at[row, last]) + 1, self._begun[place]
            versions = self._versions[begun : begun + length]
            ids, values = (all_rows[place, :length].tolist() for all_rows in (self._tokens, self._logprobs))
            reason: Literal["stop", "length"] = "stop" if stopped[row, last] else "length"
            request = self._all[self._numbers[place]]
            traces = support_trace(len(request.token_ids), self._sets[place][:length]) if request.sampling.support else {}
            per_token = Numbers("i", ids), Numbers("f", values), Numbers("i", versions)
            answer: Generation | Exception = Generation(*per_token, reason, traces)
            if broken[row, last]:
                answer = RunError(f"generation under weight version {versions[-1]} stopped: the model's logits are not finite")
            answers.append((self._numbers[place], answer))
        self._alive[rows[ended]] = False
        self._count()
        return answers

    def drop(self, numbers: set[int]) -> None:
        """Ends the rows of requests that nobody waits for."""
        self._alive &= [number not in numbers for number in self._numbers]
        self.waiting = deque(number for number in self.waiting if number not in numbers)
        self._count()

    def compact(self, least: int = 0) -> Tensor | None:
        """Leaves out finished rows if there are enough of them, ``least`` or several. Returns the places of the rows that are
        kept; None: all.
        """
        # Copying the cache costs about a step's attention: worth it only for several rows at a time.
        if not self.left or self.left > len(self._alive) - (least or self._several):
            return None
        places = self._alive.nonzero()[0]
        self._numbers = [self._numbers[place] for place in places]
        self._sets = [self._sets[place] for place in places]
        for name in ("_begun", "_limits", "_block", "_alive", "_stops", "_tokens", "_logprobs", "_uniforms"):
            setattr(self, name, getattr(self, name)[places])
        kept = torch.from_numpy(places).to(self.device, non_blocking=True)
        self._sampler.keep(kept)
        self.drawn = self.drawn[kept]
        self._count()
        return kept

    def admit(self) -> tuple[list[tuple[int, ...]], Tensor, Tensor] | None:
        """Begins waiting requests in the places of finished rows, if there are enough of them. Returns their distinct prompts, and
        on the CPU which of them each row has, and the rows' places; None: none.
        """
        if not self.waiting or (self.left and self.left > len(self._alive) - self._several):
            return None
        places = (~self._alive).nonzero()[0][: len(self.waiting)]
        for place in places:
            self._numbers[place] = self.waiting.popleft()
        return *self._open(places), torch.from_numpy(places)

    def so_far(self) -> list[Sequence[int]]:
        """Returns prompt and drawn tokens of every row that is computed."""
        prompts = [self._all[number].token_ids for number in self._numbers]
        lengths = len(self._versions) - self._begun
        drawn = (self._tokens[place, :length].tolist() for place, length in enumerate(lengths))
        return [with_images([*prompt, *ids], shown_in(prompt)) for prompt, ids in zip(prompts, drawn, strict=True)]

    def _text_stops(self, rows: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Returns, as ``at``, which tokens complete a stop string of their row. Decodes only the tail that can hold one: a token
        is at least a byte, except the first few, where decoders drop a leading space or half a character.
        """
        hits = np.zeros(at.shape, np.bool_)
        for row, place in enumerate(rows):
            texts = self._all[self._numbers[place]].sampling.stop
            reach = max(len(text.encode()) for text in texts) + 4 if texts else 0
            for step, end in enumerate(at[row] + 1 if texts else ()):
                tail_ids = self._tokens[place, max(0, end - reach) : end].tolist()
                tail = self._tokenizer.decode(tail_ids, skip_special_tokens=False)
                hits[row, step] = any(text in tail for text in texts)
        return hits


def look_every(device: torch.device) -> int:
    """Returns the number of tokens that are drawn before the host looks which rows ended."""
    return 1 if device.type == "cpu" else LOOK


def uniform_block(keys: Sequence[SampleKey], block: int) -> np.ndarray:
    """Returns ``[len(keys), BLOCK]`` float64 in [0, 1), 53 random bits each.

    They are SHAKE-128 of the key and the block number: stable across machines, and one hash call per row is cheaper than a
    generator.
    """
    suffix = f"|{block}".encode()
    digests = [hashlib.shake_128(",".join(map(str, key)).encode() + suffix).digest(8 * BLOCK) for key in keys]
    words = np.frombuffer(b"".join(digests), dtype="<u8").reshape(len(keys), BLOCK)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
