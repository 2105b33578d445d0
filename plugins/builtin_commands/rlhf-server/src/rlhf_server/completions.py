"""``completions``: texts or tokens in, texts out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_host.rollouts import Call, before_stop, encode_prompts
from rlhf_server.chat import name_of
from rlhf_server.errors import invalid
from rlhf_server.likelihoods import Scored, Wanted, by_text
from rlhf_server.limits import Limits

KNOWN = ("prompt",)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens, and its text if one was sent."""

    ids: list[int]
    text: str | None = None


def prompts_of(body: Mapping[str, Any], tokenizer: Any, vocabulary: int, limits: Limits) -> list[Prompt]:
    """Returns the prompts: one text or list of tokens, or a list of those. Raises ``ApiError`` for anything else, and for tokens
    that are not in the vocabulary.
    """
    given = body.get("prompt")
    several = isinstance(given, list) and bool(given) and all(isinstance(one, str | list) for one in given)
    if several and len(given) > limits.prompts:
        raise invalid("prompt", f"{len(given)} prompts; at most {limits.prompts}")
    places = [(f"prompt[{place}]", one) for place, one in enumerate(given)] if several else [("prompt", given)]
    return [_prompt(one, place, tokenizer, vocabulary) for place, one in places]


def _prompt(given: Any, place: str, tokenizer: Any, vocabulary: int) -> Prompt:
    if isinstance(given, str) and given:
        [ids] = encode_prompts([given], tokenizer, chat=False)
        if ids:
            return Prompt(ids, given)
    if isinstance(given, list) and given and all(type(token) is int and 0 <= token < vocabulary for token in given):
        return Prompt(given)
    raise invalid(place, f"a text, or tokens from 0 to {vocabulary - 1}, or a list of those")


def answer_of(
    prompts: Sequence[Prompt],
    calls: Sequence[Call],
    body: Mapping[str, Any],
    wanted: Wanted,
    model: str,
    tokenizer: Any,
    stop: Sequence[str],
    scored: Sequence[Scored] | None,
) -> dict[str, Any]:
    """Returns the body of an answer that is not streamed.

    Args:
        prompts: the prompt of each choice.
        calls: the call of each choice; empty if nothing was sampled.
        scored: log-probabilities of each choice's tokens, those of an echoed prompt before them; None: those of the distribution
            that was sampled.
    """
    choices, name = [], name_of(tokenizer, as_ids=bool(body.get("return_tokens_as_token_ids")))
    for place, prompt in enumerate(prompts):
        call = calls[place] if calls else None
        answer = call.generation if call is not None else None
        ids = [] if answer is None else list(answer.token_ids)
        text = before_stop(tokenizer.decode(ids, skip_special_tokens=True), stop) if ids else ""
        choice: dict[str, Any] = {
            "index": place,
            "text": f"{prompt.text or tokenizer.decode(prompt.ids)}{text}" if wanted.echo else text,
            "finish_reason": "length" if answer is None or answer.finish_reason == "length" else "stop",
            "logprobs": None,
            "prompt_token_ids": prompt.ids if call is None else call.prompt_ids,
            "token_ids": ids,
        }
        if wanted.logprobs:
            tokens = [*prompt.ids, *ids] if wanted.echo else ids
            logprobs: Sequence[float | None] = [] if answer is None else list(answer.logprobs)
            top: list[dict[str, float] | None] | None = None
            if scored is not None:
                logprobs = scored[place].logprobs
                rows = zip(scored[place].top, tokens, logprobs, strict=True)
                if wanted.top:
                    top = [None if one is None or own is None else by_text(one, token, own, name) for one, token, own in rows]
            choice["logprobs"] = {"tokens": list(map(name, tokens)), "token_logprobs": logprobs, "top_logprobs": top}
        choices.append(choice)
    number = calls[0].id if calls else "echo"
    head = {"id": number, "object": "text_completion", "created": int(time.time()), "model": model}
    return {**head, "choices": choices, "usage": _usage(prompts, choices)}


def _usage(prompts: Sequence[Prompt], choices: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Returns the tokens of the prompts, each once, and of all answers."""
    asked = sum(len(prompt.ids) for prompt in {id(prompt): prompt for prompt in prompts}.values())
    said = sum(len(choice["token_ids"]) for choice in choices)
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


def chunks_of(answer: Mapping[str, Any], usage: bool) -> list[dict[str, Any]]:
    head = {name: answer[name] for name in ("id", "object", "created", "model")}
    chunks = [{**head, "choices": [choice]} for choice in answer["choices"]]
    if usage:
        chunks.append({**head, "choices": [], "usage": answer["usage"]})
    return chunks
