"""What servers have in common: an address, whom they answer, and errors as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from secrets import compare_digest
from typing import TYPE_CHECKING, Any, TypeAlias

from rlhf_host.errors import UserError
from rlhf_host.serving.errors import ApiError, invalid

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)

Handler: TypeAlias = "Callable[[web.Request], Awaitable[web.StreamResponse]]"
Route: TypeAlias = tuple[str, str, Handler]
"""Method, path, and who answers."""


class HttpServer:
    """An HTTP server on the event loop of whoever starts it; what handlers raise becomes a JSON answer.

    Args:
        name: for messages, as "the policy server".
        body_bytes: longest body of a request.
    """

    def __init__(self, name: str, body_bytes: int):
        self.name, self.body_bytes = name, body_bytes
        self.url = ""
        self._hosts: set[str] = set()
        self._any_host = False
        self._runner: web.AppRunner | None = None
        self._said: set[str] = set()

    async def start(self, host: str, port: int, routes: Iterable[Route]) -> None:
        """Accept requests. Raises ``UserError`` without aiohttp, or where the address cannot be had."""
        try:
            from aiohttp import web
        except ImportError as error:
            raise UserError(f"{self.name} needs aiohttp: pip install 'rlhf-host[serve]'") from error
        app = web.Application(client_max_size=self.body_bytes, middlewares=[self._guarded])
        for method, path, handler in routes:
            app.router.add_route(method, path, handler)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, host, port, backlog=4096)
        try:
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise UserError(f"{self.name} cannot listen on {host}:{port}: {error.strerror}") from error
        self._runner = runner
        address = runner.addresses[0]
        self.url = f"http://[{address[0]}]:{address[1]}" if ":" in address[0] else f"http://{address[0]}:{address[1]}"
        self._hosts = {host, str(address[0]), "127.0.0.1", "localhost"}
        self._any_host = host in ("0.0.0.0", "::")  # behind a key: it cannot know its names

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def _guarded(self) -> Any:
        from aiohttp import web

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> Any:
            try:
                name = request.host.rpartition(":")[0].strip("[]")
                if not self._any_host and name not in self._hosts and request.host not in self._hosts:
                    raise ApiError(403, "this server is reached by its own address only", "wrong_host")
                return await handler(request)
            except ApiError as error:
                return web.json_response(error.body, status=error.status, headers=error.headers)
            except web.HTTPRequestEntityTooLarge:
                told = ApiError(413, f"a request has at most {self.body_bytes} bytes", "too_large")
            except web.HTTPException as error:
                told = ApiError(error.status, f"{request.method} {request.path}: {error.reason}", "not_found")
            except Exception as error:
                if (kind := type(error).__name__) not in self._said:
                    self._said.add(kind)
                    log.exception("%s failed in %s", self.name, request.match_info.handler.__name__)
                told = ApiError(500, f"{kind}: {' '.join(str(error).split())}", "internal_error")
            return web.json_response(told.body, status=told.status, headers=told.headers)

        return guarded


async def body_of(request: web.Request) -> dict[str, Any]:
    """Raises ``ApiError`` for what is no JSON object."""
    try:
        body = json.loads(await request.text())
        json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError, LookupError) as error:
        raise invalid("body", f"JSON: {' '.join(str(error).split())}") from error
    if not isinstance(body, dict):
        raise invalid("body", "a JSON object")
    return body


def check_key(request: web.Request, key: str) -> None:
    """Raises ``ApiError`` for another key than this."""
    if "Authorization" not in request.headers:
        raise ApiError(401, "no API key is given: the header Authorization: Bearer KEY", "invalid_api_key")
    given = request.headers["Authorization"].removeprefix("Bearer ")
    # Bytes that are no UTF-8 arrive as surrogates.
    if not compare_digest(given.encode(errors="surrogateescape"), key.encode()):
        raise ApiError(401, "a wrong API key", "invalid_api_key")
