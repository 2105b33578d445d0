"""Answers of an environment to ``POST /run``, compared with the policy's samples."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_host import EpisodeFailed, Trajectory

TOLD = 500
"""Maximum characters of a tool's result in the log of trajectories."""
Key = tuple[bytes, bytes]
"""An answer of the policy: digests of the tokens before it, and of its own."""


@dataclass(slots=True)
class Answer:
    """A rollout as the environment reports it."""

    reward: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    calls: Counter[Key] = field(default_factory=Counter)
    """The policy's answers, if the model server returns token ids."""
    tools: list[dict[str, Any]] = field(default_factory=list)


def read_answer(body: Mapping[str, Any], row: Mapping[str, Any]) -> Answer:
    """Reads an answer. Raises ``EpisodeFailed`` for token ids that are not valid."""
    response = body.get("response")
    output = response.get("output") if isinstance(response, Mapping) else None
    items = [item for item in output if isinstance(item, Mapping)] if isinstance(output, list) else []
    reward = body.get("reward")
    numbers = {name: _number(value) for name, value in body.items() if name not in row and name not in ("reward", "response")}
    metrics = {f"nemo_gym/{name}": number for name, number in numbers.items() if number is not None}
    answer = Answer(_number(reward), metrics)
    for item in items:
        if item.get("generation_token_ids") is not None:
            answer.calls[_ids(item, "prompt_token_ids"), _ids(item, "generation_token_ids")] += 1
    called = {item.get("call_id"): item for item in items if item.get("type") == "function_call"}
    for item in items:
        if item.get("type") == "function_call_output":
            call = called.get(item.get("call_id"), {})
            result = str(item.get("output") or "")
            answer.tools.append(
                {"name": call.get("name"), "arguments": call.get("arguments"), "result": result[:TOLD], "chars": len(result)}
            )
    return answer


def check_tokens(answer: Answer, rows: Iterable[Trajectory], *, extra: bool) -> None:
    """Raises ``EpisodeFailed`` if the environment's tokens are not those that are trained.

    Args:
        extra: the environment may have requested answers that are not in its response.
    """
    if not answer.calls:
        return
    sampled = Counter(key for row in rows for key in _calls(row))
    if strange := answer.calls - sampled:
        raise EpisodeFailed(
            f"gym_tokens: {strange.total()} of {answer.calls.total()} answers in the environment's response are not the tokens"
            " that the policy sampled for this episode"
        )
    if not extra and (missing := sampled - answer.calls):
        raise EpisodeFailed(
            f"gym_tokens: {missing.total()} of {sampled.total()} answers of the policy are not in the environment's response."
            " If the environment is meant to ask more than it shows, give --agent.hidden-calls train",
            retryable=True,
        )


def _calls(row: Trajectory) -> Iterable[Key]:
    before = hashlib.blake2b(digest_size=16)
    for segment in row.segments:
        own = _bytes(segment.token_ids)
        if segment.kind == "action":
            yield before.digest(), hashlib.blake2b(own, digest_size=16).digest()
        before.update(own)


def _ids(item: Mapping[str, Any], name: str) -> bytes:
    try:
        return hashlib.blake2b(_bytes([int(token) for token in item[name]]), digest_size=16).digest()
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EpisodeFailed(f"gym_tokens: {name} in the environment's response are no token ids") from error


def _bytes(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def _number(value: Any) -> float | None:
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        return None
    return float(value)
