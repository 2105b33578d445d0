"""Bodies of requests: read within the limit of their route, and parsed without delaying others."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import pickle
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_server import json_reader
from rlhf_server.errors import ApiError, invalid

if TYPE_CHECKING:
    from aiohttp import web

SHORT = 64 << 10
"""Maximum bytes that are parsed on the event loop, in milliseconds. More are parsed in a process: a thread would not help,
because a parser blocks all other threads.
"""
LONG_AT_ONCE = 2
"""Maximum number of longer bodies that are read and parsed at the same time; others wait."""
ARRIVAL_S = 120.0
"""Maximum seconds for a body to arrive."""


@dataclass(frozen=True, slots=True)
class Body:
    value: dict[str, Any]
    digest: bytes
    """Digest of its bytes."""
    long: bool
    """True if its contents may take long to process too."""


class Bodies:
    """Reads the bodies of one server's requests."""

    def __init__(self) -> None:
        self._long = asyncio.Semaphore(LONG_AT_ONCE)

    async def read(self, request: web.Request, most: int) -> Body:
        """Reads a body. Raises ``ApiError`` if it is not a JSON object, has more than ``most`` bytes, or does not arrive."""
        digest, short = hashlib.blake2b(digest_size=16), bytearray()
        parser: Process | None = None
        async with contextlib.AsyncExitStack() as held:
            async with _arriving():
                async for piece in _pieces(request, most):
                    digest.update(piece)
                    short += piece if parser is None else b""
                    if len(short) > SHORT:
                        parser = await held.enter_async_context(self._parser())
                        piece, short = bytes(short), bytearray()
                    if parser is not None:
                        await _feed(parser, piece)
            try:
                value = json_reader.read_object(bytes(short)) if parser is None else await _read_result(parser)
            except ValueError as error:
                raise invalid("body", f"JSON: {' '.join(str(error).split())}") from error
        return Body(value, digest.digest(), parser is not None)

    async def read_bytes(self, request: web.Request, most: int) -> bytes:
        """Reads a body that is not JSON. Raises ``ApiError`` if it has more than ``most`` bytes, or does not arrive."""
        body = bytearray()
        async with _arriving():
            async for piece in _pieces(request, most):
                body += piece
        return bytes(body)

    @contextlib.asynccontextmanager
    async def _parser(self) -> AsyncIterator[Process]:
        async with self._long:
            try:
                command = (sys.executable, "-I", "-S", json_reader.__file__)
                parser = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
            except OSError as error:
                told = f"a long body cannot be parsed now: {error.strerror}"
                raise ApiError(503, told, "overloaded", retry=True) from error
            try:
                yield parser
            finally:
                with contextlib.suppress(ProcessLookupError):
                    parser.kill()
                await parser.wait()


@contextlib.asynccontextmanager
async def _arriving() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(ARRIVAL_S):
            yield
    except TimeoutError as error:
        told = f"the body did not arrive in {ARRIVAL_S:g} s"
        raise ApiError(408, told, "timeout", retry=True) from error


async def _pieces(request: web.Request, most: int) -> AsyncIterator[bytes]:
    from aiohttp import ClientPayloadError
    from aiohttp.http_exceptions import HttpProcessingError

    if request.headers.get("Expect") and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    size = 0
    try:
        async for piece in request.content.iter_any():
            size += len(piece)
            if size > most:
                raise too_large(most)
            yield piece
    except (ClientPayloadError, HttpProcessingError) as error:
        raise invalid("body", f"it does not arrive whole: {' '.join(str(error).split())}") from error


def too_large(most: int) -> ApiError:
    return ApiError(413, f"a request here has at most {most:,} bytes", "too_large")


async def _feed(parser: Process, piece: bytes) -> None:
    assert parser.stdin is not None
    with contextlib.suppress(ConnectionError):  # it has ended, which its result tells
        parser.stdin.write(piece)
        await parser.stdin.drain()


async def _read_result(parser: Process) -> dict[str, Any]:
    """Reads the parser's output, piece by piece: see ``json_reader``. Raises ``ValueError`` for anything that is not JSON."""
    assert parser.stdin is not None
    assert parser.stdout is not None
    parser.stdin.close()
    value: dict[str, Any] = {}
    try:
        while size := int.from_bytes(await parser.stdout.readexactly(8), "big"):
            key, more, piece = pickle.loads(await parser.stdout.readexactly(size))
            if key is None:
                raise ValueError(piece)
            if more:
                value.setdefault(key, []).extend(piece)
            else:
                value[key] = piece
    except asyncio.IncompleteReadError as error:
        raise ValueError("it takes too much memory") from error
    return value
