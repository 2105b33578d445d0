"""What a server's protocol needs: its facts, requests and answers, and how it loads weights."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from rlhf_engine_http.answers import Answer
from rlhf_engine_http.connection import Connection, NoAnswer, Refusal
from rlhf_engine_http.stream import mended, stream
from rlhf_engine_http.vllm_plugin import BACKEND
from rlhf_engine_http.weights import Stored
from rlhf_host import SampleKey, UserError
from rlhf_host.engines import Request

TOP = 5
"""Number of likeliest tokens by which servers are compared."""
UNFINISHED = "-unfinished"
"""End of the name of weights that are being loaded."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server says of itself."""

    model: str
    """Directory or name of the model that it was started with."""
    context_length: int
    exact: bool
    """True if it computes in 32 bits."""
    transfer: str | None = None
    """What vLLM calls the backend for weight transfer that it was started with."""
    quantization: str | None = None
    """How it says that its weights are quantized; None: they are not."""


class Dialect(Protocol):
    """One kind of servers."""

    name: str
    truncates: bool
    """True if log-probabilities under top-k, top-p and min-p are of what they leave."""
    bounded: bool
    """True if it refuses a token outside its vocabulary, so that it can be asked for one."""
    generate: str
    """Path of requests for completions."""
    transfers: bool
    """True if weights can be sent to it, where it was started so."""

    def command(self, model: str, url: str, backend: str | None = None) -> str:
        """Returns the command that starts a fitting server, with a backend for weight transfer, where it has such."""

    async def facts(self, connection: Connection) -> Facts:
        """Raises ``UserError`` for a server that does not fit."""

    def body(self, request: Request, most: int, ends: Sequence[int], *, seeded: bool, top: int = 0) -> dict[str, Any]:
        """Returns a request for one completion of at most ``most`` tokens, that ends after any of ``ends``."""

    def answer(self, reply: Any) -> Answer:
        """Raises ``LookupError``, ``TypeError`` or ``ValueError`` for a reply of another form."""

    def likeliest(self, reply: Any) -> dict[int, float]:
        """Returns the likeliest first tokens of a reply to a request with ``top``, and their log-probabilities."""

    async def load(self, connection: Connection, stored: Stored, label: str, timeout_s: float, *, streams: bool) -> int:
        """Has the server load weights and forget what it cached under older ones. They are then called ``label``, in its answers
        too; what it has when that fails is never called so.

        Args:
            streams: send them; else the server reads their directory.

        Returns:
            the number of bytes that were sent.
        """

    def told(self, text: str) -> dict[str, float]:
        """Returns what the server's metrics, in Prometheus' format, say of ``waiting`` (requests), and of ``prompt`` and
        ``cached`` (tokens since its start).
        """

    async def label(self, connection: Connection) -> str:
        """Returns what the server's weights are called."""


def seed_of(key: SampleKey, bits: int) -> int:
    """Returns a seed of so many bits, the same on every machine."""
    digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - bits)


def _told(text: str, waiting: str, prompt: str, cached: str) -> dict[str, float]:
    """Returns the sums over labels of three of the metrics in ``text``, of those that it has."""
    found: dict[str, float] = {}
    for own, name in (("waiting", waiting), ("prompt", prompt), ("cached", cached)):
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)", text, re.MULTILINE)
        if values:
            found[own] = sum(map(float, values))
    return found


def _port(url: str) -> int:
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


class Vllm:
    """``vllm serve``: tokens in and out at ``/inference/v1/generate``, weights by its development routes (vLLM 0.32)."""

    name = "vllm"
    truncates = True
    bounded = True
    generate = "/inference/v1/generate"
    transfers = True

    def command(self, model: str, url: str, backend: str | None = None) -> str:
        transfer = "" if backend is None else f" --weight-transfer-config.backend {backend}"
        return (
            f"VLLM_SERVER_DEV_MODE=1 vllm serve {shlex.quote(model)} --port {_port(url)} --enable-scale-out"
            f" --logprobs-mode processed_logprobs --generation-config vllm{transfer}"
        )

    async def facts(self, connection: Connection) -> Facts:
        answer = await connection.get("/server_info?config_format=json")
        transfer = (answer["vllm_config"].get("weight_transfer_config") or {}).get("backend")
        if (await connection.get("/is_paused"))["is_paused"]:  # by a run that ended in the middle of a sync
            label = await self.label(connection)
            await self._resume(connection, mend=transfer == BACKEND and label.endswith(UNFINISHED))
        model, cache = answer["vllm_config"]["model_config"], answer["vllm_config"]["cache_config"]
        if model["logprobs_mode"] != "processed_logprobs":
            raise UserError(
                f"its log-probabilities are {model['logprobs_mode']}, not those of the distribution that tokens are drawn from"
                " (--logprobs-mode processed_logprobs)"
            )
        for name, value in (("logits-processors", model), ("watermark-config", answer["vllm_config"])):
            if value.get(name.replace("-", "_")):
                raise UserError(f"it does not draw from the model's own distribution (leave --{name} out)")
        if answer["vllm_config"].get("speculative_config"):
            raise UserError("it speculates, and no sync reaches its draft model (leave --speculative-config out)")
        quantization = model["quantization"]
        full = model["dtype"] == "torch.float32" and quantization is None and cache["cache_dtype"] == "auto"
        return Facts(str(model["model"]), int(model["max_model_len"]), full, transfer, quantization)

    def body(self, request: Request, most: int, ends: Sequence[int], *, seeded: bool, top: int = 0) -> dict[str, Any]:
        sampling = request.sampling
        return {
            "token_ids": list(request.token_ids),
            "sampling_params": {
                "max_tokens": most,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "seed": seed_of(request.key, 63) if seeded else None,
                "stop": list(sampling.stop) or None,
                "stop_token_ids": sorted({*ends, *sampling.stop_token_ids}),
                "ignore_eos": True,  # the end tokens are among the above
                "detokenize": bool(sampling.stop),
                "skip_special_tokens": False,
                "include_stop_str_in_output": True,
                "logprobs": top,
            },
        }

    def answer(self, reply: Any) -> Answer:
        (choice,) = reply["choices"]
        parts = choice["logprobs"]["content"]
        if [part["token_id"] for part in parts] != choice["token_ids"]:
            raise ValueError("log-probabilities are of other tokens")
        return Answer(
            choice["token_ids"],
            [part["logprob"] for part in parts],
            choice["finish_reason"],
            frozenset(span["version"] for span in choice["weight_versions"]),
            reply["usage"]["prompt_tokens"],
        )

    def likeliest(self, reply: Any) -> dict[int, float]:
        first = reply["choices"][0]["logprobs"]["content"][0]
        return {int(one["token_id"]): float(one["logprob"]) for one in first["top_logprobs"]}

    async def load(self, connection: Connection, stored: Stored, label: str, timeout_s: float, *, streams: bool) -> int:
        await connection.post("/pause?mode=abort", timeout_s=timeout_s)
        try:
            await connection.post("/update_weight_version", {"new_version": label + UNFINISHED})
            if streams:
                size = await stream(connection, stored, label, timeout_s)
            else:
                size = await self._read(connection, stored, timeout_s)
            await self._forget(connection, timeout_s)
            if not streams:
                await connection.post("/update_weight_version", {"new_version": label})
            # One that was started again meanwhile is not paused. It was just told a name for weights that it does not have.
            if not (await connection.get("/is_paused"))["is_paused"]:
                await connection.post("/update_weight_version", {"new_version": "default"})
                raise NoAnswer(f"{connection.url} was started again while it loaded weights")
        except BaseException:
            with contextlib.suppress(NoAnswer, Refusal):
                await self._resume(connection, mend=streams)
            raise
        await connection.post("/resume")
        return size

    async def _resume(self, connection: Connection, *, mend: bool) -> None:
        """Lets a server go on after weights that were not loaded.

        Args:
            mend: end the update first. Half of an update's weights have no place, and whoever asks for a completion then ends
                vLLM's engine. What it has after that is called as before: unfinished.
        """
        if mend:
            await mended(connection)
        await connection.post("/resume")

    async def _read(self, connection: Connection, stored: Stored, timeout_s: float) -> int:
        with stored.reading():
            directory = await asyncio.to_thread(stored.directory)
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            await connection.post("/collective_rpc", call, timeout_s=timeout_s)
        return 0

    async def _forget(self, connection: Connection, timeout_s: float) -> None:
        for cache in ("/reset_prefix_cache?reset_running_requests=true", "/reset_encoder_cache"):
            emptied = await connection.post(cache, timeout_s=timeout_s)
            if isinstance(emptied, Mapping) and not emptied.get("success"):
                raise UserError("it did not forget its cached prompts: do others sample from it?")

    def told(self, text: str) -> dict[str, float]:
        return _told(text, "vllm:num_requests_waiting", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")

    async def label(self, connection: Connection) -> str:
        return str((await connection.get("/weight_info"))["weight_version"])


class Sglang:
    """SGLang's own protocol: ``/generate`` with ``input_ids``, weights by ``/update_weights_from_disk``."""

    name = "sglang"
    truncates = False
    bounded = False
    generate = "/generate"
    transfers = False

    def command(self, model: str, url: str, backend: str | None = None) -> str:
        place = f"--model-path {shlex.quote(model)} --port {_port(url)}"
        return f"python -m sglang.launch_server {place} --enable-deterministic-inference"

    async def facts(self, connection: Connection) -> Facts:
        model = await connection.get("/get_model_info")
        server = await connection.get("/get_server_info")
        if not model.get("is_generation", True):
            raise UserError("its model does not generate")
        if server.get("speculative_algorithm"):
            raise UserError("it speculates, and no sync reaches its draft model (leave --speculative-algorithm out)")
        if server.get("skip_tokenizer_init"):
            raise UserError("it has no tokenizer, so stop strings do nothing (leave --skip-tokenizer-init out)")
        length = server.get("context_length") or server.get("max_req_input_len") or server.get("max_total_num_tokens")
        if not length:
            raise UserError("it does not say how long its rows may be (--context-length)")
        cached = server.get("kv_cache_dtype", "auto")
        quantization = server.get("quantization") or None
        full = server.get("dtype") == "float32" and not quantization and cached in ("auto", "float32")
        return Facts(str(model["model_path"]), int(length), full, quantization=quantization)

    def body(self, request: Request, most: int, ends: Sequence[int], *, seeded: bool, top: int = 0) -> dict[str, Any]:
        sampling = request.sampling
        parameters: dict[str, Any] = {
            "max_new_tokens": most,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop) or None,
            # Not ignore_eos: with it SGLang looks at no stop token at all.
            "stop_token_ids": sorted({*ends, *sampling.stop_token_ids}),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if seeded:
            parameters["sampling_seed"] = seed_of(request.key, 31)
        return {
            "input_ids": list(request.token_ids),
            "sampling_params": parameters,
            "return_logprob": True,
            "top_logprobs_num": top,
        }

    def answer(self, reply: Any) -> Answer:
        about = reply["meta_info"]
        parts = about["output_token_logprobs"]
        if [part[1] for part in parts] != reply["output_ids"]:
            raise ValueError("log-probabilities are of other tokens")
        reason = about["finish_reason"]
        if reason.get("matched") == "NaN happened":
            raise ValueError("the model's logits are not finite")
        labels = frozenset([about["weight_version"]])
        return Answer(reply["output_ids"], [part[0] for part in parts], reason["type"], labels, about.get("prompt_tokens"))

    def likeliest(self, reply: Any) -> dict[int, float]:
        return {int(part[1]): float(part[0]) for part in reply["meta_info"]["output_top_logprobs"][0]}

    async def load(self, connection: Connection, stored: Stored, label: str, timeout_s: float, *, streams: bool) -> int:
        with stored.reading():
            directory = await asyncio.to_thread(stored.directory)
            body = {"model_path": str(directory), "weight_version": label}
            answer = await connection.post("/update_weights_from_disk", body, timeout_s=timeout_s)
        if answer["success"] is not True:
            raise UserError(f"it did not load the weights: {answer.get('message')}")
        await connection.post("/flush_cache", timeout_s=timeout_s)
        return 0

    def told(self, text: str) -> dict[str, float]:
        return _told(text, "sglang:num_queue_reqs", "sglang:prompt_tokens_total", "sglang:cached_tokens_total")

    async def label(self, connection: Connection) -> str:
        return str((await connection.get("/get_model_info"))["weight_version"])


DIALECTS: dict[str, Dialect] = {Vllm.name: Vllm(), Sglang.name: Sglang()}
