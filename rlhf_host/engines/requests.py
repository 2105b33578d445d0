"""Requests for one completion, as engines pass them on, and the checks that refuse them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_host.errors import UserError
from rlhf_host.records.episodes import Generation, SampleKey, Sampling
from rlhf_host.records.pictures import Pictured
from rlhf_host.records.sampling import misfit


@dataclass(frozen=True, slots=True)
class Request:
    """A request; ``key`` fixes its uniforms, whatever else is in the batch."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    key: SampleKey

    @classmethod
    def of(cls, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Request:
        """Returns a request; tokens keep their pictures."""
        return cls(token_ids if isinstance(token_ids, Pictured) else tuple(token_ids), sampling, key)


@dataclass(eq=False, slots=True)
class Waiting:
    """A request and its caller."""

    request: Request
    future: asyncio.Future[Generation]


def check_request(request: Request, *, engine: str, vocabulary: int, context_length: int | None, remedy: str = "") -> None:
    """Raises ``UserError`` for a request that cannot be served.

    Args:
        engine: its name, for messages.
        vocabulary: number of token ids.
        context_length: context of the model, in tokens; None: no limit.
        remedy: further advice for a prompt that is too long.
    """
    ids = request.token_ids
    if not ids:
        raise UserError(f"engine {engine}: an empty prompt; give at least one token")
    if context_length is not None and len(ids) >= context_length:
        raise UserError(
            f"engine {engine}: a prompt of {len(ids)} tokens leaves no room in the engine's {context_length} positions;"
            f" set data.max_prompt_tokens or rollout.max_tokens lower{remedy}"
        )
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        wrong = next(token for token in ids if not 0 <= token < vocabulary)
        raise UserError(f"engine {engine}: token {wrong} is not in the model's vocabulary of {vocabulary}")
    if problem := misfit(request.sampling):
        raise UserError(f"engine {engine}: {problem}")


def end_tokens(*sources: Any) -> set[int]:
    """Returns the tokens that end a completion: ``eos_token_id`` of generation configs, model configs and tokenizers."""
    tokens: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        tokens.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return tokens
