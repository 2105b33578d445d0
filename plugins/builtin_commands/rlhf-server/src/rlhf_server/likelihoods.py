"""Log-probabilities of the model itself, by a pass over tokens that are there already: of prompts, and of other likely tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_host import RoleHandle, Segment, Task, Trajectory
from rlhf_server.asked import integer
from rlhf_server.errors import invalid

MOST = 20
"""Maximum number of likely tokens at each place, as in OpenAI's API."""
UNKNOWN = "only the sampled token's log-probability is known in a run; rlhf serve computes others"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request wants to be told beside the answer's text.

    Args:
        logprobs: log-probabilities of its tokens.
        top: number of likely tokens at each place.
        echo: the prompt stands before the answer.
    """

    logprobs: bool = False
    top: int = 0
    echo: bool = False

    @property
    def passes(self) -> bool:
        """True if the tokens have to be read again: what was sampled has the log-probabilities of its own distribution only."""
        return self.logprobs and (self.echo or self.top > 0)


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of a row's tokens at temperature 1, from a place on. None: the row begins there."""

    logprobs: Sequence[float | None]
    top: Sequence[Mapping[int, float] | None]
    """The likeliest tokens at each place, the likeliest first."""


def wanted_of(body: Mapping[str, Any], form: Literal["chat", "text", "other"], *, computed: bool) -> Wanted:
    """Returns what a request wants to be told. Raises ``ApiError`` for anything that is not known here.

    Args:
        form: OpenAI's API: chat completions, completions, or one that gives no log-probabilities of its own.
        computed: passes of the model are possible.
    """
    echo, logprobs = body.get("echo"), body.get("logprobs")
    if echo and (form != "text" or not computed):
        raise invalid("echo", "log-probabilities of prompts are computed by completions of rlhf serve only")
    if echo is not None and not isinstance(echo, bool):
        raise invalid("echo", "true or false")
    if form == "text" and computed:
        if body.get("top_logprobs"):
            raise invalid("top_logprobs", "in completions, logprobs is their number")
        top = 0 if logprobs in (None, False) or logprobs is True else integer(body, "logprobs", 0, MOST) or 0
        return Wanted(logprobs is not None and logprobs is not False, top, bool(echo))
    if logprobs not in (None, False, True):  # 0 and 1 are equal to the last two
        raise invalid("logprobs", "true or false" if form == "chat" and computed else UNKNOWN)
    if form != "chat" or not computed:
        if body.get("top_logprobs"):
            raise invalid("top_logprobs", UNKNOWN)
        return Wanted(logprobs not in (None, False))
    top = integer(body, "top_logprobs", 0, MOST) or 0
    if top and not logprobs:
        raise invalid("top_logprobs", "give logprobs: true, too")
    return Wanted(bool(logprobs), top)


async def score(role: RoleHandle, rows: Sequence[tuple[Segment, Sequence[int]]], k: int) -> list[Scored]:
    """Returns the log-probabilities of the tokens after each prompt, which has at least one token.

    Args:
        rows: prompts, and the tokens that follow them.
        k: number of likely tokens.
    """
    read = [
        Trajectory(f"text-{number}", f"text-{number}", Task(""), [prompt, Segment("action", ids)])
        for number, (prompt, ids) in enumerate(rows)
        if len(ids)
    ]
    logprobs = iter(await role.logprobs(read, temperature=1.0) if read else [])
    likeliest = iter(await role.topk(read, k, temperature=1.0) if read and k else [])
    scored = []
    for _, ids in rows:
        own = next(logprobs) if len(ids) else []
        top = next(likeliest) if len(ids) and k else [{} for _ in own]
        # Clients compare both to see whether a token is the likeliest: of two passes, they might differ in the last digit.
        scored.append(Scored([each.get(token, one) for token, one, each in zip(ids, own, top, strict=True)], top))
    return scored


def by_text(top: Mapping[int, float], token: int, logprob: float, name: Callable[[int], str]) -> dict[str, float]:
    """Returns likely tokens by their texts, with the token that stands there. Of several with the same text, such as pieces of
    one character, the likeliest counts.
    """
    texts: dict[str, float] = {}
    for other, value in top.items():
        texts.setdefault(name(other), value)
    texts.setdefault(name(token), logprob)
    return texts
