"""A server that speaks SGLang's protocol, over a tiny model, and fails as a test says."""

import asyncio
import json
import math
import threading
from pathlib import Path

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_host.distributed import reserved

LOADING = threading.Lock()
"""transformers takes functions of its classes away while it loads: two threads at once would leave them away."""


def loaded(path):
    with LOADING:
        return AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval().requires_grad_(False)


class Sglang:
    """``faults`` are taken one by one by requests to ``/generate``: each gets the answer, and returns what is sent instead.
    ``seen`` has the requests' seeds; none is answered while ``answers`` is not set.

    Args:
        place: a socket that keeps the server's port.
        raw: log-probabilities before temperature, as with ``SGLANG_RETURN_ORIGINAL_LOGPROB``.
        seeds: follow ``sampling_seed``, as with ``--enable-deterministic-inference``.
    """

    def __init__(self, model, *, place=None, raw=False, seeds=True, key=None, facts=()):
        self.model_path, self.raw, self.seeds, self.key = str(model), raw, seeds, key
        self.place = place or reserved("127.0.0.1")
        self.port = self.place.getsockname()[1]
        self.facts = {"dtype": "float32", "context_length": 512, "quantization": None, "kv_cache_dtype": "auto", **dict(facts)}
        self.url = f"http://127.0.0.1:{self.port}"
        self.faults, self.paths, self.loaded = [], [], []
        self.seen, self.answers = [], threading.Event()
        self.answers.set()
        self.broken_loads = self.wrong_loads = 0
        self.runner = None
        self.up = self.hangs = False

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="fake-sglang")
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def start(self):
        """Starts with the original weights."""
        self.model = loaded(self.model_path)
        self.tokenizer = AutoTokenizer.from_pretrained(self.model_path)
        self.label, self.up = "default", True
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)

    def kill(self):
        """Ends in the middle of whatever it answers."""
        if self.up:
            self.up = False
            asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self._loop).result(30)

    async def _start(self):
        app = web.Application(client_max_size=64 << 20, middlewares=[self._keyed])
        app.router.add_get("/health", self._health)
        app.router.add_get("/get_model_info", self._model_info)
        app.router.add_get("/get_server_info", self._server_info)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/flush_cache", self._health)
        self.runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True).start()

    @web.middleware
    async def _keyed(self, request, handler):
        self.paths.append(request.path)
        while self.hangs:
            await asyncio.sleep(0.05)
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _health(self, request):
        return web.Response()

    async def _model_info(self, request):
        return web.json_response({"model_path": self.model_path, "is_generation": True, "weight_version": self.label})

    async def _server_info(self, request):
        return web.json_response(self.facts)

    async def _update(self, request):
        body = await request.json()
        if self.broken_loads:
            self.broken_loads -= 1
            return web.json_response({"success": False, "message": "size mismatch for lm_head.weight"})
        if self.wrong_loads:
            self.wrong_loads -= 1  # says that it did
        else:
            self.model = loaded(body["model_path"])
        self.label = body["weight_version"]
        self.loaded.append(body["model_path"])
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def _generate(self, request):
        body = await request.json()
        self.seen.append(body["sampling_params"].get("sampling_seed"))
        while not self.answers.is_set():
            await asyncio.sleep(0.01)
        answer = await self._sample(body)
        if self.faults and not body["top_logprobs_num"]:
            answer = self.faults.pop(0)(answer)
            if isinstance(answer, float):
                await asyncio.sleep(answer)
                return web.Response(status=500)
            if isinstance(answer, int):
                return web.json_response({"error": {"message": "out of memory"}}, status=answer)
            if isinstance(answer, str):
                return web.Response(text=answer, content_type="application/json")
        return web.Response(text=json.dumps(answer), content_type="application/json")

    async def _sample(self, body):
        settings, ids, top = body["sampling_params"], body["input_ids"], body["top_logprobs_num"]
        random = torch.Generator()
        random.manual_seed(settings["sampling_seed"]) if self.seeds and "sampling_seed" in settings else random.seed()
        ends = {*settings["stop_token_ids"], *filter(None, [self.tokenizer.eos_token_id])}
        greedy, tokens, parts, tops, cache = settings["temperature"] == 0, [], [], [], None
        reason, given = {"type": "length", "length": settings["max_new_tokens"]}, torch.tensor([ids])
        while len(tokens) < settings["max_new_tokens"]:
            await asyncio.sleep(0)
            out = self.model(input_ids=given, past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits[0, -1]
            drawn = (logits / (settings["temperature"] or 1.0)).log_softmax(-1)
            told = logits.log_softmax(-1) if self.raw else drawn
            token = int(logits.argmax()) if greedy else int(torch.multinomial(drawn.exp(), 1, generator=random))
            tokens.append(token)
            parts.append([float(told[token]), token, None])
            if top:
                best = told.topk(top)
                tops.append([[float(value), int(at), None] for value, at in zip(*best, strict=True)])
            if len(tokens) == settings["max_new_tokens"]:
                break
            text = self.tokenizer.decode(tokens)
            if token in ends or any(stop in text for stop in settings["stop"] or ()):
                reason = {"type": "stop", "matched": token}
                break
            given = torch.tensor([[token]])
        about = {
            "finish_reason": reason,
            "prompt_tokens": len(ids),
            "weight_version": self.label,
            "output_token_logprobs": parts,
        }
        return {"text": "", "output_ids": tokens, "meta_info": about | ({"output_top_logprobs": tops} if top else {})}


def with_tokens(change):
    """A fault: other tokens, with log-probabilities that fit."""

    def fault(answer):
        answer["output_ids"] = change(answer["output_ids"])
        parts = answer["meta_info"]["output_token_logprobs"]
        answer["meta_info"]["output_token_logprobs"] = [[-1.0, token, None] for token in answer["output_ids"]][: len(parts) + 1]
        return answer

    return fault


def with_about(**changes):
    """A fault: other facts of an answer."""

    def fault(answer):
        answer["meta_info"] |= changes
        return answer

    return fault


def with_logprob(value):
    """A fault: another first log-probability."""

    def fault(answer):
        answer["meta_info"]["output_token_logprobs"][0][0] = value
        return answer

    return fault


NAN = with_logprob(math.nan)
CUT = lambda answer: json.dumps(answer)[:40]  # noqa: E731
BUSY = lambda answer: 503  # noqa: E731
FAILING = lambda answer: 500  # noqa: E731


def model_files(directory):
    return sorted(path.name for path in Path(directory).iterdir())
