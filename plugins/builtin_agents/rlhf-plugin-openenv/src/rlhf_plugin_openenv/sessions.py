"""Sessions on OpenEnv servers: one WebSocket each, as many at a time as a server allows.

The protocol: ``{"type": "reset" | "step" | "close", "data": {...}}`` to ``/ws``, and back ``{"type": "observation", "data":
{"observation", "reward", "done"}}`` or ``{"type": "error", "data": {"message", "code"}}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_host import EpisodeFailed, UserError

if TYPE_CHECKING:
    import aiohttp

POLICY = ("VALIDATION_ERROR",)
"""Error codes that are caused by the action."""
FULL = "CAPACITY_REACHED"
MESSAGE_BYTES = 64 << 20
AGAIN_S = 0.2
"""Seconds between two tries at a server that is full."""


class Refused(Exception):
    """The environment does not accept the action."""


@dataclass(slots=True)
class Session:
    """One environment on one server."""

    url: str
    socket: aiohttp.ClientWebSocketResponse
    timeout_s: float

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the environment shows.

        Raises:
            Refused: it does not accept the action.
            EpisodeFailed: anything else; another attempt may succeed if the connection was lost.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.socket.send_str(json.dumps({"type": kind} | ({"data": dict(data)} if kind != "state" else {})))
                answer = json.loads(await self.socket.receive_str())
        except TimeoutError as error:
            raise EpisodeFailed(f"openenv: {self.url} did not answer {kind} in {self.timeout_s:g} s", retryable=True) from error
        except (OSError, TypeError, ValueError) as error:  # a closed socket gives a message of another type
            raise EpisodeFailed(f"openenv: {self.url} closed the session at {kind}: {error}", retryable=True) from error
        told = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(told, dict):
            raise EpisodeFailed(f"openenv: {self.url} answered {kind} with {str(answer)[:200]}")
        if answer.get("type") == "error":
            code, message = str(told.get("code")), str(told.get("message"))
            if kind == "step" and code in POLICY:
                raise Refused(_problems(told) or message)
            raise EpisodeFailed(f"openenv: {self.url}: {code}: {message}", retryable=code == FULL)
        return told


def _problems(told: Mapping[str, Any]) -> str:
    errors = told.get("errors") or []
    return "; ".join(f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}" for one in errors if isinstance(one, dict))


class Servers:
    """A pool: the server with the fewest sessions gets the next."""

    def __init__(self, urls: Sequence[str], at_once: int, timeout_s: float, wait_s: float):
        self.urls = [url.rstrip("/") for url in urls]
        self.at_once, self.timeout_s, self.wait_s = at_once, timeout_s, wait_s
        self._open: Counter[str] = Counter()
        self._free: asyncio.Condition | None = None
        self._client: aiohttp.ClientSession | None = None

    async def schema(self, url: str) -> dict[str, Any]:
        """Returns the schema of actions on a server. Raises ``UserError`` for one that does not answer."""
        try:
            async with asyncio.timeout(self.timeout_s), self._http().get(f"{url.rstrip('/')}/schema") as answer:
                answer.raise_for_status()
                told = await answer.json()
                return dict(told.get("action") or {})
        except Exception as error:
            why = f"{type(error).__name__}: {error}".rstrip(": ")
            raise UserError(
                f"openenv: {url} does not answer as an OpenEnv server ({why}): start it, or correct agent.url"
            ) from error

    async def open(self) -> Session:
        """Opens a session. Raises ``EpisodeFailed`` if no server has a free one in time."""
        if self._free is None:
            self._free = asyncio.Condition()
        until = time.monotonic() + self.wait_s
        try:
            async with asyncio.timeout(self.wait_s), self._free:
                await self._free.wait_for(lambda: any(self._open[url] < self.at_once for url in self.urls))
                url = min(self.urls, key=lambda url: self._open[url])
                self._open[url] += 1
        except TimeoutError as error:
            raise EpisodeFailed(f"openenv: no session was free in {self.wait_s:g} s", retryable=True) from error
        try:
            return await self._connected(url, until)
        except BaseException:
            await self._released(url)
            raise

    async def give_back(self, session: Session) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self.timeout_s):
                if not session.socket.closed:
                    await session.socket.send_str('{"type": "close"}')
                await session.socket.close()
        await self._released(session.url)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _connected(self, url: str, until: float) -> Session:
        """Returns a session that answers. Asks again if a server is full, because others use it too."""
        address = url.replace("http", "ws", 1) + "/ws"
        while True:
            try:
                async with asyncio.timeout(self.timeout_s):
                    socket = await self._http().ws_connect(address, max_msg_size=MESSAGE_BYTES)
                session = Session(url, socket, self.timeout_s)
                full = await self._is_full(session)
            except (OSError, TimeoutError, _client_error()) as error:
                why = f"{type(error).__name__}: {error}"
                raise EpisodeFailed(f"openenv: {url} cannot be reached: {why}", retryable=True) from error
            if not full:
                return session
            await socket.close()
            if time.monotonic() + AGAIN_S > until:
                raise EpisodeFailed(f"openenv: {url} was full for {self.wait_s:g} s", retryable=True)
            await asyncio.sleep(AGAIN_S)

    async def _is_full(self, session: Session) -> bool:
        """Returns True if a server has no room: it then says so at once, and closes."""
        try:
            await session.ask("state", {})
        except EpisodeFailed as failure:
            if FULL in failure.reason:
                return True
            if "closed the session" in failure.reason:
                raise
        return False

    async def _released(self, url: str) -> None:
        assert self._free is not None
        async with self._free:
            self._open[url] -= 1
            self._free.notify_all()

    def _http(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._client is None:
            self._client = aiohttp.ClientSession()
        return self._client


def _client_error() -> type[Exception]:
    import aiohttp

    return aiohttp.ClientError
