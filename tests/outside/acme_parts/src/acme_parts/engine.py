"""The engine ``acme``: one completion after another, on a thread of its own, with weights of its own."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Generation, RunError, Sampling, UserError
from rlhf_host.engines.requests import Request, check_request, end_tokens
from rlhf_host.protocols import NO_WEIGHTS, Buckets, Engine, EngineStart, EngineTraits


class Acme:
    """Samples in this process from a model that it loads itself."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        fast: bool = Field(False, description="use the accelerator")
        files_only: bool = Field(False, description="take weights from files alone")

    def __init__(self, options: Options):
        self.options = options

    @property
    def traits(self) -> EngineTraits:
        libraries = ("acme_accelerator",) if self.options.fast else ()
        syncs = ("checkpoint",) if self.options.files_only else ()
        return EngineTraits(libraries=libraries, debug=False, takes="directory", largest_batch=1, syncs=syncs)

    def start(self, start: EngineStart) -> Engine:
        return OneByOne(start)


class OneByOne:
    exact = True
    dead = False

    def __init__(self, start: EngineStart):
        from transformers import AutoConfig, AutoModelForCausalLM

        from rlhf_host.engines.loading import ModuleLoader

        directory = Path(start.model)  # type: ignore[arg-type]
        try:
            if start.version == NO_WEIGHTS:
                config = AutoConfig.from_pretrained(directory)
                self.model: Any = AutoModelForCausalLM.from_config(config).float()
            else:
                self.model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
        except (OSError, ValueError) as error:
            raise UserError(f"engine acme cannot load {directory}: {error}") from error
        self.model.eval().requires_grad_(False)
        self.tokenizer, self.version, self.busy_s = start.tokenizer, start.version, 0.0
        self.context_length: int = self.model.config.max_position_embeddings
        self._ends = end_tokens(self.model.generation_config, start.tokenizer)
        self._thread = ThreadPoolExecutor(1, "acme")
        self._loader = ModuleLoader("acme", self.model, self._load)
        self._closed = False

    def expect(self, count: int) -> None:
        pass

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: tuple[int, ...]) -> Generation:
        request = Request(tuple(token_ids), sampling, key)
        vocabulary = self.model.get_input_embeddings().num_embeddings
        check_request(request, engine="acme", vocabulary=vocabulary, context_length=self.context_length)
        if sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0:
            raise UserError("engine acme samples from the whole distribution: leave top_k, top_p and min_p out")
        self._require_weights()
        given_up = threading.Event()
        completion = self._thread.submit(self._complete, request, given_up)
        try:
            return await asyncio.wrap_future(completion)
        except asyncio.CancelledError:
            given_up.set()
            raise

    def _complete(self, request: Request, given_up: threading.Event) -> Generation:
        import torch

        answer, sampling = Generation([], [], [], "length"), request.sampling
        most = min(sampling.max_new_tokens, self.context_length - len(request.token_ids))
        ends, started = self._ends | set(sampling.stop_token_ids), time.perf_counter()
        ids, cache = torch.tensor([request.token_ids]), None
        with torch.inference_mode():
            for place in range(most):
                self._require_weights()
                if given_up.is_set():
                    break
                out = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
                cache, logits = out.past_key_values, out.logits[0, -1]
                if sampling.temperature == 0:
                    token, logprob = int(logits.argmax()), 0.0
                else:
                    logprobs = (logits / sampling.temperature).log_softmax(-1)
                    uniform = random.Random(repr((*request.key, place))).random()
                    shares = logprobs.double().exp().cumsum(0)
                    token = min(int(torch.searchsorted(shares, uniform * shares[-1], right=True)), len(shares) - 1)
                    logprob = float(logprobs[token])
                answer.token_ids.append(token)
                answer.logprobs.append(logprob)
                answer.versions.append(self.version)
                text = self.tokenizer.decode(answer.token_ids) if sampling.stop else ""
                if token in ends or text.endswith(sampling.stop or "\0"):
                    answer.finish_reason = "stop"
                    break
                ids = torch.tensor([[token]])
        self.busy_s += time.perf_counter() - started
        return answer

    def set_version(self, version: int) -> None:
        if self.version != version:
            raise RunError(f"engine acme holds version {self.version}, not {version}")

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        from rlhf_host.engines.loading import call_by_path

        return [await asyncio.to_thread(call_by_path, function, self._loader, arguments)]

    def _load(self, buckets: Buckets, version: int) -> None:
        self._thread.submit(self._replace_weights, buckets, version).result()

    def _replace_weights(self, buckets: Buckets, version: int) -> None:
        from rlhf_host.engines.loading import copy_weights

        self.version = NO_WEIGHTS
        copy_weights(self.model, buckets)
        self.version = version

    def _require_weights(self) -> None:
        if self._closed:
            raise RunError("engine acme is closed")
        if self.version == NO_WEIGHTS:
            raise RunError("engine acme has no weights of this run")

    async def sleep(self) -> None:
        pass

    async def wake(self) -> None:
        pass

    async def close(self) -> None:
        self._closed = True
        self._thread.shutdown(wait=False)
