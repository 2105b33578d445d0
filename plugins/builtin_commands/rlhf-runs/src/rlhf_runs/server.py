"""Server for a page in the browser that follows running runs."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from secrets import compare_digest, token_urlsafe
from typing import TYPE_CHECKING

from rlhf_server import ApiError, HttpServer, Route

from rlhf_host import RunDirectory, UserError
from rlhf_runs.report import Shown, document, pack

if TYPE_CHECKING:
    from aiohttp import web

FILES = ("config.yaml", "run.json", "metrics.jsonl", "ledger.jsonl", "trajectories")
"""Files that change while a run goes on."""
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


class RunsServer:
    """The page of ``rlhf report`` on this machine, piece by piece. Its address has a token; requests without it are refused."""

    def __init__(self, runs: Sequence[RunDirectory], names: Sequence[str]):
        self._shown = [Shown(run, name) for run, name in zip(runs, names, strict=True)]
        stamp = self._stamp()
        self._heads = [shown.head() for shown in self._shown]
        self._head = stamp, pack(self._heads)
        self._page, policy = document(names, {})
        self._policy = f"{policy}; frame-ancestors 'none'"
        self._token = token_urlsafe(16)
        self._http = HttpServer("rlhf view")
        self._reading, self._answering = asyncio.Lock(), asyncio.Lock()

    async def start(self, port: int) -> str:
        """Starts the server; returns the address to open. Raises ``UserError`` if the port is not available."""
        routes = {
            "/{token}/": self._send_page,
            "/{token}/chunk/head": self._send_head,
            "/{token}/chunk/{name}": self._send_answers,
        }
        await self._http.start("127.0.0.1", port, (Route("GET", path, send, self._admit) for path, send in routes.items()))
        return f"{self._http.url}/{self._token}/"

    def _admit(self, request: web.Request) -> None:
        if not compare_digest(request.match_info["token"].encode(errors="surrogateescape"), self._token.encode()):
            raise ApiError(404, "there is no such page", "not_found")

    async def close(self) -> None:
        await self._http.close()

    async def _send_page(self, request: web.Request) -> web.Response:
        return _response({"Content-Security-Policy": self._policy}, text=self._page, content_type="text/html")

    async def _send_head(self, request: web.Request) -> web.Response:
        """Sends the head, or nothing if the page has seen it."""
        async with self._reading:
            stamp, packed = self._head = await asyncio.to_thread(self._read)
        if request.query.get("seen") == stamp:
            return _response(status=204)
        return _response(body=packed, headers={"ETag": stamp})

    def _read(self) -> tuple[str, bytes]:
        stamp = self._stamp()
        if stamp == self._head[0]:
            return self._head
        for place, shown in enumerate(self._shown):
            try:
                shown.run = RunDirectory(shown.run.path)
                self._heads[place] = shown.head()
            except UserError as error:  # it was removed, or is no run any more
                self._heads[place] |= {"status": "removed", "warnings": [str(error)]}
        return stamp, pack(self._heads)

    def _stamp(self) -> str:
        """Returns a value that changes when there is something new."""
        return hashlib.sha256(repr([_state(shown.run) for shown in self._shown]).encode()).hexdigest()

    async def _send_answers(self, request: web.Request) -> web.Response:
        (number, _, place), step = request.match_info["name"].partition("-"), 0
        try:
            split, _, last = place.rpartition("-")
            shown, step = self._shown[int(number.removeprefix("run"))], int(last)
            async with self._answering:  # apart from the head, as the first answers load a tokenizer
                return _response(body=await asyncio.to_thread(lambda: pack(shown.answers(split, step))))
        except (ValueError, IndexError, KeyError):
            raise ApiError(404, "there are no such answers", "not_found") from None


def _response(headers: dict[str, str] | None = None, **what: object) -> web.Response:
    from aiohttp import web

    return web.Response(headers=HEADERS | (headers or {}), **what)  # type: ignore[arg-type]


def _state(run: RunDirectory) -> list[object]:
    state: list[object] = [run.in_use]
    for path in (run.path / name for name in FILES):
        try:
            found = path.stat()
        except OSError:
            state.append(None)
        else:
            state.append((found.st_mtime_ns, found.st_size))
    return state
