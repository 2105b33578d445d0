"""Servers of an environment: their start and end, turns as JSON, answers as they are sent, and access."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlhf_server import ApiError, HttpServer, Route

from rlhf_environments.opening import Opened
from rlhf_environments.playing import Environment, Full, Result
from rlhf_environments.policy import Answer, Question
from rlhf_host import EpisodeFailed, RunError, UserError

if TYPE_CHECKING:
    from aiohttp import web

BODY_BYTES = 16 << 20
"""Longest message of a client."""
ANSWER = ("message", "tool_calls", "truncated", "reasoning")
"""Keys of an answer."""


class Server(ABC):
    """A server of one environment over HTTP."""

    def __init__(self, environment: Environment):
        self.environment = environment
        self._http = HttpServer("the environment's server")

    @property
    def url(self) -> str:
        return self._http.url

    async def start(self, host: str, port: int) -> None:
        """Accepts requests. Raises ``UserError`` if the address is not available."""
        await self._http.start(host, port, self._routes())

    async def close(self) -> None:
        await self._http.close()

    @abstractmethod
    def _routes(self) -> Iterator[Route]:
        """Yields what can be asked."""


class Invalid(ValueError):
    """Something that a client sent and that cannot be used."""


def serve(opened: Opened, server: Server, host: str, port: int, ready: Callable[[Server], Any]) -> None:
    """Serves until interrupted. Raises ``UserError`` for an address that is not available, and ``KeyboardInterrupt``."""
    running = opened.session
    running.run(server.start(host, port))
    try:
        ready(server)
        running.run(asyncio.Event().wait())
    finally:
        running.run(server.close(), interruptible=False)


def of_this_machine(request: web.Request) -> None:
    """Refuses pages of browsers, which would reach a server of this machine in the name of whoever looks at them."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        raise ApiError(403, f"a page of {origin} has no access", "wrong_origin")


def turn_told(turn: Question | Result) -> dict[str, Any]:
    """Returns a turn as JSON."""
    if isinstance(turn, Result):
        return {"done": True, **turn.told}
    text = "\n".join(text_of(message.get("content")) for message in turn.new)
    messages, new = [*map(dict, turn.messages)], [*map(dict, turn.new)]
    return {"done": False, "text": text, "messages": messages, "new": new, "tools": [*map(dict, turn.tools)]}


def text_of(content: Any) -> str:
    """Returns the text of a message's content, which may have parts."""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content or ())


def answer_of(sent: Mapping[str, Any]) -> Answer:
    """Returns the answer that a client sent. Raises ``Invalid``."""
    if unknown := [name for name in sent if name not in ANSWER]:
        raise Invalid(f"{unknown[0]}: not known; an answer has {', '.join(ANSWER)}")
    message, calls = sent.get("message"), sent.get("tool_calls") or ()
    if message is None and not calls:
        raise Invalid("message: the answer's text is missing")
    if not isinstance(message, str | None):
        raise Invalid(f"message: a text, not {type(message).__name__}")
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise Invalid("tool_calls: a list of calls as in OpenAI's chat completions")
    if not isinstance(truncated := sent.get("truncated", False), bool):
        raise Invalid("truncated: true or false")
    return Answer(message or "", calls, truncated, sent.get("reasoning"))


def failure(error: Exception) -> tuple[str, str, bool]:
    """Returns kind and message of an error, and whether the same may succeed later. Other errors than these are raised again."""
    if isinstance(error, Invalid):
        return "invalid", str(error), False
    if isinstance(error, Full):
        return "full", error.reason, True
    if isinstance(error, EpisodeFailed):
        return "failed", error.reason, error.retryable
    cause = error.__cause__ or error
    if isinstance(cause, UserError | RunError):
        return "failed", f"{error}", False
    return "failed", f"{type(error).__name__}: {' '.join(str(error).split())}", False
