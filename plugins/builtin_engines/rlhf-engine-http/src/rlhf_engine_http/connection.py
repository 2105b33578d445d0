"""One server's HTTP: JSON there and back, and each way in which that fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

SHOWN = 300
"""Characters of a server's own message that are shown."""
IDLE_S = 3.0
"""Seconds after which an unused connection is closed: uvicorn, under vLLM and SGLang, closes its end after 5."""


class NoAnswer(Exception):
    """No usable answer, which another try may give. ``gone``: no connection was made."""

    def __init__(self, why: str, *, gone: bool = False):
        super().__init__(why)
        self.gone = gone


class Refusal(Exception):
    """The server understood and refused: a status from 400 to 499."""

    def __init__(self, url: str, path: str, status: int, said: str):
        super().__init__(f"{url}{path} answered with status {status}: {said}")
        self.status, self.said = status, said


class Connection:
    """Requests to one server. Used on one event loop.

    Args:
        key: sent as ``Authorization: Bearer``.
    """

    def __init__(self, url: str, key: str | None):
        self.url = url
        self._key = key
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def get(self, path: str, *, timeout_s: float = 30.0) -> Any:
        return await self.ask("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = 30.0) -> Any:
        return await self.ask("POST", path, body, timeout_s)

    async def text(self, path: str, *, timeout_s: float = 30.0) -> str:
        """Returns the text of an answer. Raises as ``ask``."""
        return (await self._content("GET", path, None, timeout_s)).decode(errors="replace")

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        """Returns the JSON of an answer with status 200; text that is no JSON counts only where it is empty, as None.

        Raises:
            NoAnswer: nothing was reached, or in time, or whole, or the server failed.
            Refusal: the status is one from 300 to 499, but not "too early" or "too many".
        """
        content = await self._content(method, path, body, timeout_s)
        if not content.strip():
            return None
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise NoAnswer(
                f"{self._where(path)} answered with something that is no JSON: {self._without_key(_short(content))!r}"
            ) from error

    async def _content(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> bytes:
        if self._closed:
            raise NoAnswer("the engine is closed", gone=True)
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        where = self._where(path)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, self.url + path, json=body, allow_redirects=False, timeout=aiohttp.ClientTimeout(total=None)
                ) as answer,
            ):
                content, status = await answer.read(), answer.status
        except TimeoutError as error:
            raise NoAnswer(f"{where} did not answer in {timeout_s:g} s") from error
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError) as error:
            # Also of a server that closes a connection which was not used for long: another look tells whether it is gone.
            raise NoAnswer(f"{where} ended in the middle of an answer") from error
        except (OSError, aiohttp.ClientError) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise NoAnswer(f"{self.url} cannot be reached ({' '.join(why.split())})", gone=True) from error
        if status != 200:
            said = self._without_key(_message(content))
            if status >= 500 or status in (408, 425, 429):
                raise NoAnswer(f"{where} answered with status {status}: {said}")
            raise Refusal(self.url, path.partition("?")[0], status, said)
        return content

    def _where(self, path: str) -> str:
        return f"{self.url}{path.partition('?')[0]}"

    def _without_key(self, text: str) -> str:
        """Returns what a server says, which may repeat the key."""
        return text if self._key is None else text.replace(self._key, "(the key)")

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None


def _message(content: bytes) -> str:
    """Returns the message in a server's error, where there is one."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return _short(content)
    for key in ("error", "detail", "message"):
        while isinstance(found, Mapping) and key in found:
            found = found[key]
    return " ".join(str(found).split())[:SHOWN]


def _short(content: bytes) -> str:
    return " ".join(content[:SHOWN].decode(errors="replace").split())
