"""A server that is a command: messages on its standard input and output, and the end of its standard error, all within limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from rlhf_plugin_mcp.servers import Server

MOST_LINE = 16 << 20
"""Most bytes of one line."""
MOST_LINES, MOST_BYTES = 10_000, 64 << 20
"""Most that a server writes, messages or not, after the last message to it."""
TAIL = 1200
"""Bytes of its standard error that are kept."""
PATIENCE_S = 2.0
"""Seconds for the server to end by itself, and again after SIGTERM."""
GONE = (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError)


class Command:
    """The process of one server."""

    def __init__(self, server: Server):
        self.server = server
        self.problem = ""
        """Limit that it went beyond, so that nothing more is read."""
        self.tail = b""
        self._lines = self._bytes = 0

    @contextlib.asynccontextmanager
    async def streams(self) -> AsyncIterator[tuple[Any, Any]]:
        """Starts it, and gives a stream of its messages and one of those to it. Ends it with everything that it started. Raises
        ``OSError`` and ``ValueError`` if it does not start.
        """
        process = await asyncio.create_subprocess_exec(
            *self.server.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=get_default_environment() | dict(self.server.env),
            cwd=self.server.cwd,
            start_new_session=True,
            limit=MOST_LINE,
        )
        told, messages = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        questions, asked = anyio.create_memory_object_stream[SessionMessage](0)
        work = (self._read(process, told), self._write(process, asked, told), self._hear(process))
        tasks = [asyncio.create_task(each) for each in work]
        try:
            yield messages, questions
        finally:
            for stream in (messages, questions):
                stream.close()
            await asyncio.shield(_stop(process, tasks))

    async def _read(self, process: Any, told: Any) -> None:
        async with told:
            with contextlib.suppress(*GONE):
                while line := await self._line(process):
                    try:
                        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                    except ValueError:
                        continue  # a line of a log
                    await told.send(SessionMessage(message))

    async def _line(self, process: Any) -> bytes:
        """Returns the next line; nothing at the end, and beyond a limit."""
        try:
            line: bytes = await process.stdout.readline()
        except ValueError:
            self.problem = f"it wrote a line of more than {MOST_LINE >> 20} MiB"
            return b""
        self._lines += 1
        self._bytes += len(line)
        if self._lines <= MOST_LINES and self._bytes <= MOST_BYTES:
            return line
        self.problem = f"it wrote {self._lines:,} lines with {self._bytes:,} bytes that nobody asked for"
        return b""

    async def _write(self, process: Any, asked: Any, told: Any) -> None:
        async with asked:
            with contextlib.suppress(*GONE):
                async for each in asked:
                    self._lines = self._bytes = 0
                    process.stdin.write(each.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                    await process.stdin.drain()
                return
        told.close()  # it cannot be asked any more

    async def _hear(self, process: Any) -> None:
        with contextlib.suppress(OSError):
            while heard := await process.stderr.read(1 << 16):
                self.tail = (self.tail + heard)[-TAIL:]


async def _stop(process: Any, tasks: list[asyncio.Task[None]]) -> None:
    process.stdin.close()
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, number)  # what it started ends with it
        until = time.monotonic() + PATIENCE_S
        while process.returncode is None and time.monotonic() < until:  # wait() waits for others that have its pipes, too
            await asyncio.sleep(0.02)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    process._transport.close()
