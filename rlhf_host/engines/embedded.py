"""The embedded engine: batched generation with the trainer's own module, in this process."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf_host.engines.loading import ModuleLoader, call_by_path, copy_weights
from rlhf_host.engines.requests import Request, check_request, end_tokens
from rlhf_host.engines.sampling import Sampler
from rlhf_host.engines.transformers import Transformers
from rlhf_host.engines.uniforms import BLOCK, uniform_block
from rlhf_host.engines.waves import Dropped, Finish, Waves
from rlhf_host.errors import RunError
from rlhf_host.models.loading import context_length
from rlhf_host.models.modes import evaluation
from rlhf_host.plugins.threads import Threads
from rlhf_host.protocols import Buckets, Decoder, EngineStart, Use
from rlhf_host.records.episodes import Generation, SampleKey, Sampling
from rlhf_host.records.numbers import Numbers


class EmbeddedEngine:
    """Generates with ``start.model``, any causal language model of transformers; a request's tokens depend on its key alone.

    Where the module is the trainer's own, new weights need no copying: ``set_version`` says that they changed. An engine with a
    module to itself starts with version -1 and generates once a sync has brought it weights, which come between two tokens of a
    batch.
    """

    def __init__(self, options: Transformers.Options, start: EngineStart):
        model: Any = start.model
        self.options, self.model, self.tokenizer, self.version = options, model, start.tokenizer, start.version
        self._compute, self._kernels = start.compute, start.kernels
        use = self._use
        self.exact = use.autocast is None and use.dtype == torch.float32
        self.dead = False
        self.busy_s = 0.0
        self._incoming: deque[Callable[[], None]] = deque()
        """Weights to load as soon as the compute thread has time."""
        self._fresh: Decoder | None = None
        """The decoder that has been refreshed since the weights changed."""
        self._waves = Waves(self._run, start.compute, options.max_wait_s)
        self._threads = Threads(4)
        self._loader = ModuleLoader("transformers", model, self._load)
        self.context_length = context_length(model)
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self._eos = end_tokens(model.generation_config, start.tokenizer)

    @property
    def _use(self) -> Use:
        """As the model is now: it may have been moved or cast."""
        weight, choice = next(self.model.parameters()), self.options.autocast
        on = choice == "bfloat16" or (choice == "auto" and weight.is_cuda and torch.cuda.is_bf16_supported())
        autocast = torch.bfloat16 if on else None
        return Use(purpose="sample", device=weight.device, dtype=weight.dtype, autocast=autocast)

    def expect(self, count: int) -> None:
        self._waves.expect(count)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        request = Request(tuple(token_ids), sampling, key)
        check_request(request, engine="transformers", vocabulary=self._vocabulary, context_length=self.context_length)
        return await self._waves.submit(request)

    def set_version(self, version: int) -> None:
        self.version, self._fresh = version, None

    async def run(self, function: str, **arguments: Any) -> Any:
        """``"package.module:function"(loader, **arguments)``, in a thread; loader as in ``rlhf_host.engines.loading``."""
        return await asyncio.wrap_future(self._threads.submit(lambda: call_by_path(function, self._loader, arguments)))

    async def sleep(self) -> None:
        """Nothing to give back: the module is the trainer's."""

    async def wake(self) -> None:
        """Undo ``sleep``."""

    async def close(self) -> None:
        self._threads.close()
        await self._waves.close()

    def _load(self, buckets: Buckets, version: int) -> None:
        """Copy into the module by name, between two tokens, then hold ``version``; called from a thread beside."""
        done: Future[None] = Future()

        def load() -> None:
            try:
                self._replace_weights(buckets, version)
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        self._incoming.append(load)
        self._compute.submit(self._take_in)
        done.result()

    def _take_in(self) -> None:
        while self._incoming:
            self._incoming.popleft()()

    def _replace_weights(self, buckets: Buckets, version: int) -> None:
        self.version = -1
        copy_weights(self.model, buckets)
        self.set_version(version)

    def _require_weights(self) -> None:
        if self.version < 0:
            raise RunError("engine transformers has no weights of this run (never synced, or a sync failed): sync it first")

    def _limit(self, request: Request) -> int:
        """New tokens at most: what was asked for, or what the model has positions for."""
        return min(request.sampling.max_new_tokens, self.context_length - len(request.token_ids))

    def _run(self, requests: list[Request], finish: Finish, dropped: Dropped) -> None:
        self._require_weights()
        started, use = time.perf_counter(), self._use
        longest = max(len(request.token_ids) + self._limit(request) for request in requests)
        autocast = torch.autocast(use.device.type, use.autocast, enabled=use.autocast is not None)
        try:
            decoder = self._kernels.decoder(self.model, use, longest)
            with torch.inference_mode(), evaluation(self.model), autocast:
                for rows in self._batches(requests, decoder.ragged):
                    if not self._decode(decoder, requests, rows, finish, dropped):
                        return
        finally:
            self.busy_s += time.perf_counter() - started

    def _batches(self, requests: list[Request], ragged: bool) -> Iterable[list[int]]:
        """Split by ``max_batch_size`` and ``max_batch_tokens``, in the given order (by prompt length first, where padding is
        not to be had). A prompt counts once however many rows share it."""
        lengths = [0 if ragged else len(request.token_ids) for request in requests]
        for length in sorted(set(lengths)):
            batch: list[int] = []
            tokens, prompts = 0, set[tuple[int, ...]]()
            for i in (i for i, own_length in enumerate(lengths) if own_length == length):
                prompt = requests[i].token_ids
                own = self._limit(requests[i]) + (0 if prompt in prompts else len(prompt))
                full = self.options.max_batch_tokens is not None and tokens + own > self.options.max_batch_tokens
                if batch and (full or len(batch) == self.options.max_batch_size):
                    yield batch
                    batch, tokens, prompts = [], 0, set()
                    own = self._limit(requests[i]) + len(prompt)
                batch.append(i)
                prompts.add(prompt)
                tokens += own
            if batch:
                yield batch

    def _decode(self, decoder: Decoder, requests: list[Request], indices: list[int], finish: Finish, dropped: Dropped) -> bool:
        """One batch from prefill to the last row. False when nobody waits for the rest."""
        prompts = {prompt: n for n, prompt in enumerate(dict.fromkeys(requests[i].token_ids for i in indices))}
        indices = sorted(indices, key=lambda i: prompts[requests[i].token_ids])
        rows = [requests[i] for i in indices]
        number = {i: row for row, i in enumerate(indices)}

        version = self.version
        # Drawing works in float64, which MPS does not have.
        home = next(self.model.parameters()).device
        device = torch.device("cpu") if home.type == "mps" else home
        limit_list = [self._limit(row) for row in rows]
        self._refresh(decoder)
        longest = max(limit_list)
        groups = torch.tensor([prompts[row.token_ids] for row in rows], device=device)
        logits = decoder.prefill(list(prompts)).to(device)[groups]
        if longest > 1:
            decoder.start(groups.to(home), longest - 1)

        sampler = Sampler([row.sampling for row in rows], device)
        ends = [torch.tensor([*self._eos, *row.sampling.stop_token_ids], dtype=torch.int64) for row in rows]
        stops = pad_sequence(ends, batch_first=True, padding_value=-1).to(device)
        limits = torch.tensor(limit_list, device=device)
        texts = {row: request.sampling.stop for row, request in enumerate(rows) if request.sampling.stop}
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64, device=device)
        logprobs = torch.zeros(len(rows), longest, device=device)
        versions: list[int] = []
        here = torch.arange(len(rows), device=device)
        alive = torch.ones(len(rows), dtype=torch.bool, device=device)
        places = list(range(len(rows)))
        uniforms = torch.empty(0)

        for step in range(longest):
            if step % BLOCK == 0:
                uniforms = torch.from_numpy(uniform_block([rows[r].key for r in places], step // BLOCK)).to(device)
            try:
                drawn, drawn_logprobs = sampler.draw(logits, uniforms[:, step % BLOCK])
            except ArithmeticError as error:
                raise RunError(f"generation under weight version {version} stopped: {error}") from error
            versions.append(version)
            tokens[here, step] = drawn
            logprobs[here, step] = drawn_logprobs

            stopped = (drawn[:, None] == stops).any(-1)
            if texts:
                stopped |= self._text_stops(texts, places, alive, tokens, step).to(device)
            ended = (stopped | (limits == step + 1)) & alive
            gone = dropped()
            if gone is True:
                return False
            if bool(ended.any()):
                finished = here[ended]
                columns = (finished, stopped[ended], tokens[finished, : step + 1], logprobs[finished, : step + 1])
                results = []
                for row, stop, ids, values in zip(*(column.tolist() for column in columns), strict=True):
                    per_token = Numbers("i", ids), Numbers("f", values), Numbers("i", versions)
                    answer = Generation(*per_token, "stop" if stop else "length")
                    results.append((indices[row], answer))
                finish(results)
                alive &= ~ended
            if gone:
                cancelled = {number[i] for i in gone if i in number}
                alive &= torch.tensor([row not in cancelled for row in places], device=device)
            left = int(alive.sum())
            if left == 0:
                break
            # Copying the cache costs about a step's attention: worth it only for several rows at a time.
            if left <= len(places) - max(1, len(places) // 8):
                rest = alive.nonzero()[:, 0]
                decoder.keep(rest.to(home))
                sampler.keep(rest)
                drawn, here, alive, stops, limits, uniforms = (t[rest] for t in (drawn, here, alive, stops, limits, uniforms))
                places = here.tolist()
            self._take_in()
            self._require_weights()
            if version != self.version:
                version = self.version
                self._refresh(decoder)
                if self.options.kv_after_sync == "recompute":
                    so_far = [
                        [*rows[row].token_ids, *ids] for row, ids in zip(places, tokens[here, : step + 1].tolist(), strict=True)
                    ]
                    logits = decoder.prefill(so_far).to(device)
                    if longest > step + 2:
                        decoder.start(torch.arange(len(places), device=home), longest - step - 2)
                    continue
            logits = decoder.step(drawn.to(home)).to(device)
        return True

    def _refresh(self, decoder: Decoder) -> None:
        if self._fresh is not decoder:
            decoder.refresh()
            self._fresh = decoder

    def _text_stops(
        self, texts: dict[int, tuple[str, ...]], places: list[int], alive: Tensor, tokens: Tensor, step: int
    ) -> Tensor:
        """Which rows end in one of their stop strings. Only the tail that can hold one is decoded: a token is a byte at least,
        but for the first few, where decoders drop a leading space or half a character."""
        hits = []
        for row, going in zip(places, alive.tolist(), strict=True):
            if not going or row not in texts:
                hits.append(False)
                continue
            reach = max(len(text.encode()) for text in texts[row]) + 4
            tail = self.tokenizer.decode(tokens[row, max(0, step + 1 - reach) : step + 1].tolist(), skip_special_tokens=False)
            hits.append(any(text in tail for text in texts[row]))
        return torch.tensor(hits)
