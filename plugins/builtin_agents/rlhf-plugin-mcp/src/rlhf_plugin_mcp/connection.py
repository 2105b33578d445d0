"""A connection to an MCP server: opened and closed by one task, used by any, opened anew after a fault."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult, Tool

from rlhf_plugin_mcp.address import Address
from rlhf_plugin_mcp.servers import Server
from rlhf_plugin_mcp.stdio import MOST_LINE, Command

CLOSED = -32000
"""Code of an error of the connection, not of the tool."""
STOP_S = 10.0
WORDS = 300
MOST_TOOLS = 1000


class ServerLost(Exception):
    """A server that did not start, ended, or does not answer."""


class Connection:
    """A connection to one server.

    Args:
        start_timeout_s: deadline for its start, with its first answer.
    """

    def __init__(self, server: Server, start_timeout_s: float):
        self.server, self.start_timeout_s = server, start_timeout_s
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._command, self._address = Command(server), Address(self._over.set)

    async def open(self) -> None:
        """Starts the server, or connects to it. Raises ``ServerLost``."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody waits for it after the deadline
        self._task = asyncio.create_task(self._hold(ready))
        try:
            async with asyncio.timeout(self.start_timeout_s):
                await asyncio.shield(ready)
        except TimeoutError as error:
            self._task.cancel()
            await self.close()
            raise ServerLost(f"{self._who} did not start in {self.start_timeout_s:g} s{self._words()}") from error
        except BaseException:
            await self.close()
            raise

    @property
    def lost(self) -> bool:
        """True if it is of no more use."""
        return self._task is None or self._task.done() or self._over.is_set()

    async def tools(self) -> list[Tool]:
        """Returns the tools of the server, all within the deadline of its start. Raises ``ServerLost``."""
        tools: list[Tool] = []
        cursor: str | None = None
        until = time.monotonic() + self.start_timeout_s
        while True:
            listing = partial(Client.list_tools, cursor=cursor)
            listed = await self._within(self.start_timeout_s, "tools/list", listing, until - time.monotonic())
            tools += listed.tools
            cursor = listed.next_cursor
            if len(tools) > MOST_TOOLS:
                self._over.set()
                raise ServerLost(f"{self._who} lists more than {MOST_TOOLS:,} tools")
            if not cursor:
                return tools

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> CallToolResult:
        """Calls a tool. Raises ``ServerLost``, and ``MCPError`` for a call that the server refuses."""
        result = await self._within(timeout_s, name, lambda client: client.call_tool(name, dict(arguments)))
        if not isinstance(result, CallToolResult):
            raise ServerLost(f"{self._who} answered {name} with {type(result).__name__}")
        return result

    async def close(self) -> None:
        """Ends it. May be called any number of times."""
        self._over.set()
        if self._task is not None and not self._task.done():
            with contextlib.suppress(TimeoutError, asyncio.CancelledError, Exception):
                async with asyncio.timeout(STOP_S):
                    await asyncio.shield(self._task)
            self._task.cancel()

    async def _within(self, timeout_s: float, what: str, work: Any, left_s: float | None = None) -> Any:
        if self.lost or self._client is None:
            raise ServerLost(f"{self._who} is gone")
        try:
            async with asyncio.timeout(timeout_s if left_s is None else left_s):
                return await work(self._client)
        except TimeoutError as error:
            self._over.set()
            raise ServerLost(f"{self._who} did not answer {what} in {timeout_s:g} s{self._words()}") from error
        except MCPError as error:
            if error.code != CLOSED and not self._address.problem:
                raise
            self._over.set()
            raise ServerLost(f"{self._who} ended in {what}{self._words()}") from error
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._over.set()
            raise ServerLost(f"{self._who} failed in {what}: {type(error).__name__}: {error}{self._words()}") from error

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        """Opens and closes it: both in one task, as the library demands."""
        try:
            async with self._opened() as client:
                self._client = client
                ready.set_result(None)
                await self._over.wait()
        except BaseException as error:
            if not ready.done():
                why = _inner(error)
                ready.set_exception(ServerLost(f"{self._who} does not start: {type(why).__name__}: {why}{self._words()}"))
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._over.set()

    @contextlib.asynccontextmanager
    async def _opened(self) -> Any:
        server = self.server
        async with contextlib.AsyncExitStack() as stack:
            if server.url:
                http = await stack.enter_async_context(self._address.client(server.headers))
                transport = streamable_http_client(server.url, http_client=http, max_sse_event_size=MOST_LINE)
            else:
                transport = self._command.streams()
            yield await stack.enter_async_context(Client(transport))

    @property
    def _who(self) -> str:
        return f"the MCP server {self.server.name}"

    def _words(self) -> str:
        """Returns the limit that it went beyond, or the last words of its standard error."""
        text = (
            self._command.problem
            or self._address.problem
            or " ".join(self._command.tail.decode("utf-8", "replace").split())[-WORDS:]
        )
        return f": {text}" if text else ""


def _inner(error: BaseException) -> BaseException:
    """Returns the first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
