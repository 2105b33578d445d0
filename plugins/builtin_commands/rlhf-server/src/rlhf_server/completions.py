"""``completions``: a text or tokens in, a text out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_host.rollouts import Call, before_stop, encode_prompts
from rlhf_server.chat import usage_of
from rlhf_server.errors import invalid

KNOWN = ("prompt",)


def prompt_of(body: Mapping[str, Any], tokenizer: Any, vocabulary: int) -> list[int]:
    """Returns the prompt's tokens. Raises ``ApiError`` for anything but a text or tokens of the vocabulary."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        [ids] = encode_prompts([prompt], tokenizer, chat=False)
        if ids:
            return ids
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < vocabulary for token in prompt):
        return prompt
    raise invalid("prompt", f"a text, or tokens from 0 to {vocabulary - 1}; one prompt a request")


def answer_of(
    calls: Sequence[Call], body: Mapping[str, Any], model: str, tokenizer: Any, stop: Sequence[str]
) -> dict[str, Any]:
    choices = []
    for place, call in enumerate(calls):
        answer = call.generation
        assert answer is not None
        choice: dict[str, Any] = {
            "index": place,
            "text": before_stop(tokenizer.decode(list(answer.token_ids), skip_special_tokens=True), stop),
            "finish_reason": "length" if answer.finish_reason == "length" else "stop",
            "logprobs": None,
            "prompt_token_ids": call.prompt_ids,
            "token_ids": list(answer.token_ids),
        }
        if body.get("logprobs") not in (None, False):
            ids = bool(body.get("return_tokens_as_token_ids"))
            texts = [f"token_id:{token}" if ids else tokenizer.decode([token]) for token in answer.token_ids]
            choice["logprobs"] = {"tokens": texts, "token_logprobs": list(answer.logprobs), "top_logprobs": None}
        choices.append(choice)
    head = {"id": calls[0].id, "object": "text_completion", "created": int(time.time()), "model": model}
    return {**head, "choices": choices, "usage": usage_of(calls)}


def chunks_of(answer: Mapping[str, Any], usage: bool) -> list[dict[str, Any]]:
    head = {name: answer[name] for name in ("id", "object", "created", "model")}
    chunks = [{**head, "choices": [choice]} for choice in answer["choices"]]
    if usage:
        chunks.append({**head, "choices": [], "usage": answer["usage"]})
    return chunks
