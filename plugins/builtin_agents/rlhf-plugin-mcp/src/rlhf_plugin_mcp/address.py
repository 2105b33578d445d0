"""A server at an address: what it sends, within the limits of a command's output."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

import httpx2
from mcp.client.streamable_http import create_mcp_http_client

from rlhf_plugin_mcp.stdio import MOST_BYTES, MOST_LINE

PLAIN = {"accept-encoding": "identity"}
"""Header by which bytes are counted as they are: a compressed answer may be a thousand times as large."""


class Address:
    """The answers of one server.

    Args:
        over: called when the server went beyond a limit, so that nothing more is read.
    """

    def __init__(self, over: Callable[[], None]):
        self._over = over
        self.problem = ""
        """Limit that it went beyond."""
        self._bytes = 0

    def client(self, headers: Mapping[str, str]) -> httpx2.AsyncClient:
        client = create_mcp_http_client(headers={**headers, **PLAIN})
        client.event_hooks = {"request": [self._asked], "response": [self._answered]}
        return client

    async def _asked(self, request: httpx2.Request) -> None:
        self._bytes = 0

    async def _answered(self, response: httpx2.Response) -> None:
        if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
            self._end(f"it answered in {encoding}, which nobody asked for")
        events = response.headers.get("content-type", "").startswith("text/event-stream")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Counted(response.stream, self, MOST_BYTES if events else MOST_LINE)

    def count(self, size: int, most: int) -> None:
        """Raises ``StreamError`` where an answer goes beyond the most that it may have."""
        self._bytes += size
        if self._bytes > most:
            self._end(f"it answered with more than {most >> 20} MiB")

    def _end(self, problem: str) -> None:
        self.problem = problem
        self._over()
        raise httpx2.StreamError(problem)


class _Counted(httpx2.AsyncByteStream):
    """The bytes of one answer."""

    def __init__(self, stream: httpx2.AsyncByteStream, address: Address, most: int):
        self._stream, self._address, self._most = stream, address, most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._address.count(len(part), self._most)
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
