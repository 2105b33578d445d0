"""The embedded engine: batched generation with the trainer's own module, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from torch import Tensor, nn

from rlhf_host.engines.decoders import Twin, fast_path_problem, make_decoder, prepare_lean
from rlhf_host.engines.loading import Buckets, ModuleLoader, call_by_path, copy_weights
from rlhf_host.engines.protocol import Request
from rlhf_host.engines.sampling import Sampler
from rlhf_host.engines.uniforms import BLOCK, uniform_block
from rlhf_host.engines.waves import Dropped, Finish, Waves
from rlhf_host.errors import RunError, UserError
from rlhf_host.plugins.threads import Threads
from rlhf_host.records.episodes import FinishReason, Generation, SampleKey, Sampling

log = logging.getLogger(__name__)


class TransformersEngine:
    """Generates with ``model``, any causal language model of transformers; a request's tokens depend on its key alone.

    Where the module is the trainer's own, new weights need no copying: ``set_version`` says that they changed. (A change that
    raises the parameters' own counters is noticed without it; a fused optimizer's step does not.) An engine with
    a module to itself starts with ``version=-1`` and generates once ``load_weights`` has brought it some.
    """

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        max_batch_size: PositiveInt = Field(256, description="completions decoded together")
        max_batch_tokens: PositiveInt | None = Field(
            None, description="tokens of key-value cache in one batch; default: no limit"
        )
        max_wait_s: float = Field(
            5.0, ge=0, description="longest wait for an expected request before a batch starts without it"
        )
        autocast: Literal["auto", "off", "bfloat16"] = Field(
            "auto", description="auto: bfloat16 where the hardware has it (CUDA)"
        )

    waves = True
    """It decodes a batch to its end before the next, so whoever feeds it does well to wait for all that may come."""

    def __init__(self, options: Options, *, model: nn.Module, tokenizer: Any, version: int = 0):
        self.options, self.model, self.tokenizer, self.version = options, model, tokenizer, version
        self._twin: Twin | None = None
        self._fast = False
        self.busy_s = 0.0  # seconds spent generating so far
        self._lock = threading.Lock()
        self._waves = Waves(self._run, options.max_wait_s)
        self._threads = Threads(4)
        self._loader = ModuleLoader("transformers", model, self._replace_weights)
        config = model.config.get_text_config()  # type: ignore[operator,union-attr]
        self._max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        self._eos = _eos_ids(model, tokenizer)

    @property
    def decoding(self) -> str:
        """``shared-prefix``, or ``generic`` where the model needs its own attention; known after the first batch."""
        return "shared-prefix" if self._fast else "generic"

    # The async face.

    def expect(self, count: int) -> None:
        self._waves.expect(count)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        return (await self.generate_group(token_ids, sampling, [key]))[0]

    async def generate_group(self, token_ids: Sequence[int], sampling: Sampling, keys: Sequence[SampleKey]) -> list[Generation]:
        if not keys:
            return []
        prompt = tuple(token_ids)
        requests = [Request(prompt, sampling, key) for key in keys]
        self._validate(requests[0])
        self._require_weights()
        return await self._waves.submit_all(requests)

    def set_version(self, version: int) -> None:
        self.version = version

    async def load_weights(self, buckets: Buckets, version: int) -> None:
        """Copy into the module by name, then hold ``version``; a failure leaves an engine that refuses to generate."""
        await asyncio.wrap_future(self._threads.submit(lambda: self._replace_weights(buckets, version)))

    async def run(self, function: str, **arguments: Any) -> Any:
        """``"package.module:function"(loader, **arguments)``, in a thread; loader as in ``rlhf_host.engines.loading``."""
        return await asyncio.wrap_future(self._threads.submit(lambda: call_by_path(function, self._loader, arguments)))

    def compute_with(self, execute: Callable[[Callable[[], None]], None]) -> None:
        """Let ``execute(work)`` choose the thread that generates (it returns when the work is done); default: one of its own."""
        self._waves.execute = execute

    async def close(self) -> None:
        self._threads.close()
        await self._waves.close()

    # The work.

    def _replace_weights(self, buckets: Buckets, version: int) -> None:
        with self._lock:
            self.version = -1
            copy_weights(self.model, buckets)
            self.version = version

    def _require_weights(self) -> None:
        if self.version < 0:
            raise RunError("engine transformers has no weights of this run (never synced, or a sync failed): sync it first")

    def generate_batch(self, requests: Sequence[Request]) -> list[Generation]:
        """Sample every request, in this thread. Raises ``UserError`` for one that cannot be served."""
        for request in requests:
            self._validate(request)
        order = sorted(range(len(requests)), key=lambda i: (requests[i].key, requests[i].token_ids))
        results: dict[int, Generation] = {}
        self._run([requests[i] for i in order], lambda done: results.update({order[i]: one for i, one in done}), set)
        return [results[i] for i in range(len(requests))]

    def _validate(self, request: Request) -> None:
        ids, sampling = request.token_ids, request.sampling
        if not ids:
            raise UserError("engine transformers: an empty prompt; give at least one token")
        if self._max_positions is not None and len(ids) >= self._max_positions:
            raise UserError(
                f"engine transformers: a prompt of {len(ids)} tokens leaves no room in the model's {self._max_positions} "
                "positions; set data.max_prompt_tokens or rollout.max_tokens lower"
            )
        if not 0 <= min(ids) <= max(ids) < self._vocabulary:
            wrong = next(token for token in ids if not 0 <= token < self._vocabulary)
            raise UserError(f"engine transformers: token {wrong} is not in the model's vocabulary of {self._vocabulary}")
        if sampling.max_new_tokens < 1 or sampling.temperature < 0 or sampling.top_k < 0:
            raise UserError(
                f"engine transformers: max_new_tokens ≥ 1, temperature ≥ 0 and top_k ≥ 0 are needed, not {sampling}"
            )
        if not 0 < sampling.top_p <= 1 or not 0 <= sampling.min_p <= 1:
            raise UserError(f"engine transformers: top_p in (0, 1] and min_p in [0, 1] are needed, not {sampling}")

    def _limit(self, request: Request) -> int:
        """New tokens at most: what was asked for, or what the model has positions for."""
        asked = request.sampling.max_new_tokens
        return asked if self._max_positions is None else min(asked, self._max_positions - len(request.token_ids))

    def _run(self, requests: list[Request], finish: Finish, dropped: Dropped) -> None:
        started = time.perf_counter()
        try:
            self._run_batches(requests, finish, dropped)
        finally:
            self.busy_s += time.perf_counter() - started

    def _run_batches(self, requests: list[Request], finish: Finish, dropped: Dropped) -> None:
        with self._lock, torch.inference_mode():
            self._require_weights()
            twin, dtype = self._prepare()
            with torch.autocast(twin.device.type, dtype, cache_enabled=False) if dtype else contextlib.nullcontext():
                for rows in self._batches(requests):
                    if not self._decode(twin, dtype, requests, rows, finish, dropped):
                        return

    def _prepare(self) -> tuple[Twin, torch.dtype | None]:
        dtype = _autocast_dtype(self.options.autocast, next(self.model.parameters()).device)
        fresh = self._twin is None or not self._twin.current()
        if fresh:
            self._twin = Twin(self.model)
        twin = self._twin
        assert twin is not None
        if fresh:
            twin.refresh(self.version, dtype, 1, 1)
            with torch.autocast(twin.device.type, dtype, cache_enabled=False) if dtype else contextlib.nullcontext():
                problem = fast_path_problem(twin, dtype)
            self._fast = problem is None
            if problem is None and dtype is None:
                prepare_lean(twin)
            if problem:
                log.info("%s decodes with transformers' own cache and attention: %s", type(twin.model).__name__, problem)
        return twin, dtype

    def _batches(self, requests: list[Request]) -> Iterable[list[int]]:
        """Split by ``max_batch_size`` and ``max_batch_tokens``, in the given order (by prompt length first, where padding is
        not to be had). A prompt counts once however many rows share it."""
        order = range(len(requests))
        kinds = [list(order)]
        if not self._fast:
            kinds = [
                [i for i in order if len(requests[i].token_ids) == n] for n in sorted({len(r.token_ids) for r in requests})
            ]
        for indices in kinds:
            batch: list[int] = []
            tokens, prompts = 0, set[tuple[int, ...]]()
            for i in indices:
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

    def _decode(
        self,
        twin: Twin,
        dtype: torch.dtype | None,
        requests: list[Request],
        indices: list[int],
        finish: Finish,
        dropped: Dropped,
    ) -> bool:
        """One batch from prefill to the last row. False when nobody waits for the rest."""
        prompts: dict[tuple[int, ...], int] = {}
        for i in indices:
            prompts.setdefault(requests[i].token_ids, len(prompts))
        indices = sorted(indices, key=lambda i: prompts[requests[i].token_ids])
        rows = [requests[i] for i in indices]
        number = {i: row for row, i in enumerate(indices)}

        version = self.version
        # Drawing works in float64, which MPS does not have.
        device = torch.device("cpu") if twin.device.type == "mps" else twin.device
        limit_list = [self._limit(row) for row in rows]
        twin.refresh(version, dtype, len(rows), sum(limit_list))
        decoder = make_decoder(twin, dtype, self._fast, copies=self.options.max_batch_tokens is None)
        longest = max(limit_list)
        groups = torch.tensor([prompts[row.token_ids] for row in rows], device=device)
        logits = decoder.prefill(list(prompts)).to(device)[groups]
        if longest > 1:
            decoder.start(groups.to(twin.device), longest - 1)

        sampler = Sampler([row.sampling for row in rows], device)
        stops, limits = self._stop_table(rows, device), torch.tensor(limit_list, device=device)
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
                positions = ended.nonzero()[:, 0]
                reasons = stopped[positions].tolist()
                finished = here[positions]
                drawn_rows = zip(
                    finished.tolist(),
                    reasons,
                    tokens[finished, : step + 1].tolist(),
                    logprobs[finished, : step + 1].tolist(),
                    strict=True,
                )
                results = []
                for row, stop, ids, values in drawn_rows:
                    reason: FinishReason = "stop" if stop else "length"
                    results.append((indices[row], Generation(ids, values, list(versions), reason)))
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
                decoder.keep(rest.to(twin.device))
                sampler.keep(rest)
                drawn, here, alive, stops, limits, uniforms = (t[rest] for t in (drawn, here, alive, stops, limits, uniforms))
                places = here.tolist()
            if version != self.version:
                version = self.version
                twin.renew(version, dtype)
            logits = decoder.step(drawn.to(twin.device)).to(device)
        return True

    def _stop_table(self, rows: Sequence[Request], device: torch.device) -> Tensor:
        """``[B, S]`` token ids that end each row, padded with -1."""
        ids = [sorted(self._eos | set(row.sampling.stop_token_ids)) for row in rows]
        width = max(1, *map(len, ids))
        return torch.tensor([[*row, *[-1] * (width - len(row))] for row in ids], device=device)

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


def _eos_ids(model: nn.Module, tokenizer: Any) -> set[int]:
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return found


def _autocast_dtype(choice: str, device: torch.device) -> torch.dtype | None:
    if choice == "bfloat16" or (choice == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported()):
        return torch.bfloat16
    return None
