"""The embedded engine: batched generation with the trainer's own module, in this process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlhf_host.engines.embedded_rows import OpenRows
from rlhf_host.engines.loading import ModuleLoader, call_by_path, copy_weights
from rlhf_host.engines.requests import Request, check_request, end_tokens
from rlhf_host.engines.transformers import Transformers
from rlhf_host.engines.waves import Dropped, Finish, Waves
from rlhf_host.errors import RunError
from rlhf_host.models.loading import context_length
from rlhf_host.models.masters import autocast_of
from rlhf_host.models.precision import evaluation
from rlhf_host.phases import slow_phase
from rlhf_host.plugins.threads import Threads
from rlhf_host.protocols import NO_WEIGHTS, Buckets, Decoder, EngineStart, RefilledDecoder, Use
from rlhf_host.records.episodes import Generation, SampleKey, Sampling
from rlhf_host.records.pictures import images_of
from rlhf_host.spans import span


class EmbeddedEngine:
    """Engine that generates with ``start.model``, any causal language model of transformers; a request's tokens depend on its
    key alone.

    If the module is the trainer's own, new weights need no copying: ``set_version`` tells that they changed. An engine with its
    own module starts with version -1 and generates once a sync has brought weights, which are loaded between two tokens of a
    batch.
    """

    def __init__(self, options: Transformers.Options, start: EngineStart):
        model: Any = start.model
        self.options, self.model, self.tokenizer, self.version = options, model, start.tokenizer, start.version
        self._compute, self._kernels = start.compute, start.kernels
        # Weights that are not the trainer's are rounded here.
        autocast_of(model, options.autocast, model.device, rounds=start.version == NO_WEIGHTS)
        use = self._use
        self.exact = use.autocast is None and use.dtype == torch.float32
        self.dead = False
        self.busy_s, self.sampled = 0.0, 0
        self._incoming: deque[Callable[[], None]] = deque()
        """Weights to load as soon as the compute thread is free."""
        self._fresh: Decoder | None = None
        """Decoder that was refreshed after the weights changed."""
        self._waves = Waves(self._run, start.compute, options.max_wait_s)
        self._threads = Threads(4)
        self._loader = ModuleLoader("transformers", model, self._load)
        self.context_length = context_length(model)
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self._eos = end_tokens(model.generation_config, start.tokenizer)

    @property
    def _use(self) -> Use:
        """Use of the model in its present state: it may have been moved or cast."""
        weight = next(self.model.parameters())
        autocast = autocast_of(self.model, self.options.autocast, weight.device)
        return Use(purpose="sample", device=weight.device, dtype=weight.dtype, autocast=autocast)

    def expect(self, count: int) -> None:
        self._waves.expect(count)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        request = Request.of(token_ids, sampling, key)
        check_request(request, engine="transformers", vocabulary=self._vocabulary, context_length=self.context_length)
        room = self.context_length - len(request.token_ids)
        if sampling.max_new_tokens > room:
            request = replace(request, sampling=replace(sampling, max_new_tokens=room))
        return await self._waves.submit(request)

    def set_version(self, version: int) -> None:
        self.version, self._fresh = version, None

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        """Runs ``"package.module:function"(loader, **arguments)`` in a thread; loader as in ``rlhf_host.engines.loading``."""
        return [await asyncio.wrap_future(self._threads.submit(lambda: call_by_path(function, self._loader, arguments)))]

    async def sleep(self) -> None:
        """Does nothing: the module is the trainer's, so there is no memory to free."""

    async def wake(self) -> None:
        """Reverses ``sleep``."""

    async def close(self) -> None:
        self._threads.close()
        await self._waves.close()

    def _load(self, buckets: Buckets, version: int) -> None:
        """Copies weights into the module by name, between two tokens, then sets ``version``; called from another thread."""
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
        """Loads weights that have come meanwhile. Raises ``RunError`` if the module has none of this run."""
        while self._incoming:
            self._incoming.popleft()()
        if self.version < 0:
            raise RunError("engine transformers has no weights of this run (never synced, or a sync failed): sync it first")

    def _replace_weights(self, buckets: Buckets, version: int) -> None:
        self.version = -1
        copy_weights(self.model, buckets)
        self.set_version(version)

    def _run(self, requests: list[Request], finish: Finish, dropped: Dropped) -> None:
        self._take_in()
        use = self._use
        longest = max(len(request.token_ids) + request.sampling.max_new_tokens for request in requests)
        autocast = torch.autocast(use.device.type, use.autocast, enabled=use.autocast is not None)
        with span("generate", self, "busy_s"):
            pictured = any(images_of(request.token_ids) for request in requests)
            decoder = self._kernels.decoder(self.model, use, longest, pictured)
            with torch.inference_mode(), evaluation(self.model), autocast:
                whole = [list(range(len(requests)))] if self._refills(decoder) else None
                for rows in whole or self._batches(requests, decoder.ragged):
                    if not self._decode(decoder, requests, rows, finish, dropped):
                        break
            if isinstance(decoder, RefilledDecoder):
                decoder.end()

    def _batches(self, requests: list[Request], ragged: bool) -> Iterable[list[int]]:
        """Splits requests by ``max_batch_size`` and ``max_batch_tokens``, in the given order (by prompt length first, if
        padding is not possible). A prompt counts once however many rows share it.
        """
        lengths = [0 if ragged else len(request.token_ids) for request in requests]
        for length in sorted(set(lengths)):
            batch: list[int] = []
            tokens, prompts = 0, set[tuple[int, ...]]()
            for i in (i for i, own_length in enumerate(lengths) if own_length == length):
                prompt, limit = requests[i].token_ids, requests[i].sampling.max_new_tokens
                own = limit + (0 if prompt in prompts else len(prompt))
                full = self.options.max_batch_tokens is not None and tokens + own > self.options.max_batch_tokens
                if batch and (full or len(batch) == self.options.max_batch_size):
                    yield batch
                    batch, tokens, prompts = [], 0, set()
                    own = limit + len(prompt)
                batch.append(i)
                prompts.add(prompt)
                tokens += own
            if batch:
                yield batch

    def _decode(self, decoder: Decoder, requests: list[Request], indices: list[int], finish: Finish, dropped: Dropped) -> bool:
        """Computes one batch from prefill to the last row. Returns False if nobody waits for the rest."""
        # Drawing works in float64, which MPS does not have.
        home = next(self.model.parameters()).device
        device = torch.device("cpu") if home.type == "mps" else home
        most = self.options.max_batch_size if self._refills(decoder) else 0
        rows = OpenRows({i: requests[i] for i in indices}, self._eos, self.tokenizer, device, most)
        version, before = self.version, self.sampled
        logits = self._prefill(decoder, rows, home)
        while True:
            rows.draw(logits, version)
            if not (rows.due or self._incoming or version != self.version):
                logits = decoder.step(rows.drawn.to(home)).to(device)
                continue
            if answers := rows.look():
                finish(answers)
            self.sampled = before + rows.sampled
            gone = dropped()
            if gone is True:
                return False
            if gone:
                rows.drop(gone)
            entered = rows.admit()
            if not rows.left:
                return True
            kept = None if entered else rows.compact()
            if kept is not None:
                decoder.keep(kept.to(home))
            self._take_in()
            changed, version = version != self.version, self.version
            if changed:
                self._refresh(decoder)
            if changed and self.options.kv_after_sync == "recompute":
                logits = self._prefill_again(decoder, rows, home)
                continue
            logits = decoder.step(rows.drawn.to(home)).to(device)
            if entered and isinstance(decoder, RefilledDecoder):
                logits[entered[2].to(device)] = decoder.refill(*entered).to(device)

    def _refills(self, decoder: Decoder) -> bool:
        """Returns True if rows that end make room for others. A limit of tokens is one of whole batches."""
        return isinstance(decoder, RefilledDecoder) and self.options.max_batch_tokens is None

    def _prefill(self, decoder: Decoder, rows: OpenRows, home: torch.device) -> Tensor:
        """Returns ``[B, V]``: each row's logits after its prompt."""
        self._refresh(decoder)
        line = f"Computing {len(rows.prompts):,} prompts of {sum(map(len, rows.prompts)):,} tokens"
        with nullcontext() if self.sampled else slow_phase(line):  # later waves surprise nobody
            logits = decoder.prefill(rows.prompts).to(rows.device)[rows.prompt_of_row]
        if rows.longest > 1 or rows.waiting:
            decoder.start(rows.prompt_of_row.to(home), rows.longest - 1)
        return logits

    def _prefill_again(self, decoder: Decoder, rows: OpenRows, home: torch.device) -> Tensor:
        """Returns ``[B, V]``: each row's logits after its present tokens, with keys and values computed anew."""
        rows.compact(least=1)
        logits = decoder.prefill(rows.so_far()).to(rows.device)
        decoder.start(torch.arange(len(logits), device=home), rows.longest - 1)
        return logits

    def _refresh(self, decoder: Decoder) -> None:
        if self._fresh is not decoder:
            decoder.refresh()
            self._fresh = decoder
