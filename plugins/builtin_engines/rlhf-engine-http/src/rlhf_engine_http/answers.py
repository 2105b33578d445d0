"""Answers of servers, checked: a wrong one never becomes a completion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_host import Sampling
from rlhf_host.engines import Request

WORST = -9998.0
"""vLLM writes -9999 for log-probabilities that JSON does not have: NaN, and infinite ones."""


OTHER_FORM = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Errors of reading a reply that has another form than its protocol's."""


class Wrong(Exception):
    """The answer is outside of the protocol, or cannot be the answer to what was asked."""


class Aborted(Exception):
    """The server gave up a request."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion as a server tells it."""

    token_ids: Sequence[Any]
    logprobs: Sequence[Any]
    reason: Any
    """``stop``, ``length`` or ``abort``."""
    labels: frozenset[str]
    """The names of the weights that sampled it."""
    prompt_tokens: Any
    """Number of tokens that the server counts in the prompt; ``None``: it does not say."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a run's model allows in an answer."""

    vocabulary: int
    """Number of token ids."""
    ends: frozenset[int]
    """The tokens that end any completion."""
    most: int
    """Number of tokens that this completion may have."""


def checked(answer: Answer, request: Request, expected: Expected) -> tuple[list[int], list[float], str]:
    """Returns token ids, their log-probabilities and the finish reason.

    Raises:
        Wrong: something else than tokens of the model, each with the log-probability of a draw; the text says what.
        Aborted: the server gave the request up.
    """
    if answer.reason == "abort":
        raise Aborted
    tokens, sampling = list(answer.token_ids), request.sampling
    if wrong := [token for token in tokens if type(token) is not int or not 0 <= token < expected.vocabulary]:
        raise Wrong(f"token {wrong[0]!r:.40} is not in the model's vocabulary of {expected.vocabulary}")
    if not 0 < len(tokens) <= expected.most:
        raise Wrong(f"{len(tokens)} tokens, where 1 to {expected.most} were asked for")
    if answer.prompt_tokens is not None and answer.prompt_tokens != len(request.token_ids):
        raise Wrong(f"it counts {answer.prompt_tokens!r:.40} tokens in a prompt of {len(request.token_ids)}")
    ends = expected.ends | set(sampling.stop_token_ids)
    if (early := next((place for place, token in enumerate(tokens[:-1]) if token in ends), None)) is not None:
        raise Wrong(f"it goes on after token {tokens[early]}, which ends a completion")
    return (
        tokens,
        _logprobs(answer.logprobs, len(tokens), sampling),
        _reason(answer.reason, tokens, ends, expected.most, sampling),
    )


def _logprobs(values: Sequence[Any], count: int, sampling: Sampling) -> list[float]:
    if len(values) != count:
        raise Wrong(f"{len(values)} log-probabilities for {count} tokens")
    for value in values:
        if type(value) not in (int, float) or not WORST < value < math.inf:
            raise Wrong(f"the log-probability {value!r:.40}: the model's logits are not finite")
        if value > 1e-5:
            raise Wrong(f"the log-probability {value!r:.40}, which is above 0")
    return [0.0] * count if sampling.temperature == 0 else [min(float(value), 0.0) for value in values]


def _reason(reason: Any, tokens: list[int], ends: frozenset[int], most: int, sampling: Sampling) -> str:
    if tokens[-1] in ends:
        return "stop"  # also where it is the last that was allowed
    if reason == "length" and len(tokens) == most:
        return "length"
    if reason == "stop" and sampling.stop:
        return "stop"
    if reason == "stop":
        raise Wrong(f"it ends at token {tokens[-1]}, which ends no completion of the run's model (eos_token_id differs)")
    raise Wrong(f"it ends after {len(tokens)} of {most} tokens, for {reason!r:.80}")
