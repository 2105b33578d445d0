"""Requests for samples, read and checked, and their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_server import ApiError

from rlhf_tinker.bodies import invalid, number, whole

SAMPLES = 1024
"""Maximum number of answers of one request."""
REFUSED = {
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "prompt_alt_tokens_k": 0,
    "target_prompt_logprobs": None,
}
"""Fields of a request that this server has nothing for → the value that asks for nothing."""
PARAMS = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    truncated: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for samples."""

    sampler: str
    prompt: tuple[int, ...]
    count: int
    max_tokens: int
    temperature: float
    settings: tuple[tuple[str, Any], ...]
    """Other settings of ``rollout``."""
    seed: int | None
    prompt_logprobs: int
    """Number of the prompt's last tokens whose log-probabilities are wanted; -1: of a prompt of one token, which has none."""
    number: int = -1
    """Steps and loads of the model that the weights have had; see ``Snapshot``."""

    @property
    def together(self) -> Any:
        """Equal for requests that can be answered at once; None: alone. The seed fixes the samples of one request only."""
        if self.seed is not None or self.prompt_logprobs:
            return None
        return self.sampler, self.count, self.max_tokens, self.temperature, self.settings


def read_ask(body: Mapping[str, Any], sampler: str, vocabulary: int | None, room: int) -> Ask:
    """Returns a request. Raises ``ApiError`` for one that cannot be answered.

    Args:
        room: number of tokens that the model can read.
    """
    for name, nothing in REFUSED.items():
        if body.get(name) not in (nothing, None):
            raise ApiError(
                400, f"{name} is not here: this server gives log-probabilities of the tokens themselves", "not_here", name
            )
    prompt = tokens_of(body.get("prompt"), vocabulary)
    params = body.get("sampling_params")
    if not isinstance(params, Mapping):
        raise invalid("sampling_params", "an object")
    if odd := [name for name in params if name not in PARAMS]:
        raise invalid(f"sampling_params.{odd[0][:40]}", f"unknown; there are {', '.join(PARAMS)}")
    count = whole(body.get("num_samples", 1), "num_samples", 1, SAMPLES)
    limit = room - len(prompt)
    if limit < 1:
        raise invalid("prompt", f"it has {len(prompt)} tokens, and the model room for {room}")
    most = params.get("max_tokens")
    max_tokens = limit if most is None else whole(most, "sampling_params.max_tokens", 1, 2**31 - 1)
    if max_tokens > limit:
        told = f"the prompt has {len(prompt)} tokens and the model room for {room}: at most {limit}"
        raise invalid("sampling_params.max_tokens", told)
    temperature = number(params.get("temperature", 1.0), "sampling_params.temperature", 0.0, 1000.0)
    settings: dict[str, Any] = {}
    top_p = number(params.get("top_p", 1.0), "sampling_params.top_p", 0.0, 1.0)
    if top_p == 0:
        raise invalid("sampling_params.top_p", "above 0")
    top_k = params.get("top_k", -1)
    top_k = 0 if top_k == -1 else whole(top_k, "sampling_params.top_k", 0, 2**31 - 1)
    if top_p < 1:
        settings["top_p"] = top_p
    if top_k:
        settings["top_k"] = top_k
    settings |= _stops(params.get("stop"), vocabulary)
    seed = None if params.get("seed") is None else whole(params["seed"], "sampling_params.seed", 0, 2**63 - 1)
    wanted = body.get("prompt_logprobs") or False
    last = body.get("prompt_logprobs_last_n")
    if not isinstance(wanted, bool):
        raise invalid("prompt_logprobs", "true or false")
    if last is not None:
        if not wanted:
            raise invalid("prompt_logprobs_last_n", "only with prompt_logprobs")
        last = whole(last, "prompt_logprobs_last_n", 1, max(1, len(prompt) - 1))
    scored = 0 if not wanted else len(prompt) - 1 if last is None else min(last, len(prompt) - 1)
    if wanted and not scored:
        scored = -1  # one token, which nothing comes before
    return Ask(sampler, prompt, count, max_tokens, temperature, tuple(sorted(settings.items())), seed, scored)


def _stops(stop: Any, vocabulary: int | None) -> dict[str, Any]:
    if stop is None:
        return {}
    listed = [stop] if isinstance(stop, str) else stop
    if not isinstance(listed, list) or len(listed) > 64:
        raise invalid("sampling_params.stop", "a text, or a list of at most 64 texts or token ids")
    if all(isinstance(each, str) and 0 < len(each) <= 1000 for each in listed):
        return {"stop": tuple(listed)} if listed else {}
    if all(_is_token(each, vocabulary) for each in listed):
        return {"stop_token_ids": tuple(listed)}
    raise invalid("sampling_params.stop", "texts that are not empty, or ids of tokens that the model has")


def tokens_of(prompt: Any, vocabulary: int | None) -> tuple[int, ...]:
    """Returns the tokens of a ``ModelInput``. Raises ``ApiError`` for pictures, sounds and tokens that the model does not have."""
    chunks = prompt.get("chunks") if isinstance(prompt, Mapping) else None
    if not isinstance(chunks, list):
        raise invalid("prompt", "an object with chunks")
    ids: list[int] = []
    for chunk in chunks:
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, Mapping) else None
        if kind != "encoded_text":
            raise ApiError(
                400, f"prompt: chunks of type {str(kind)[:40]!r} are not here, only encoded_text", "not_here", "prompt"
            )
        tokens = chunk.get("tokens")
        if not isinstance(tokens, list):
            raise invalid("prompt", "tokens are a list")
        if (odd := next((each for each in tokens if not _is_token(each, vocabulary)), None)) is not None:
            raise invalid("prompt", f"it has the token {str(odd)[:40]}, and the model {vocabulary} tokens")
        ids += tokens
    if not ids:
        raise invalid("prompt", "it is empty")
    return tuple(ids)


def _is_token(value: Any, vocabulary: int | None) -> bool:
    return type(value) is int and 0 <= value < (vocabulary or 2**31)
