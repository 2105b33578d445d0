"""Common parts of servers: an address, access, and errors as JSON."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from secrets import compare_digest
from typing import TYPE_CHECKING, Any, TypeAlias

from rlhf_host import UserError
from rlhf_server.bodies import Bodies, Body, too_large
from rlhf_server.errors import ApiError, openai_form

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)

Handler: TypeAlias = "Callable[[web.Request], Awaitable[web.StreamResponse]]"
Admit: TypeAlias = "Callable[[web.Request], object]"
LINGER_S = 5.0
"""Seconds for which the rest of a refused body is read and dropped, because many clients read no answer before they have sent
all.
"""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""Headers of every answer that has no others: no answer is a page."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route: the handler of a method and path.

    Args:
        admit: raises ``ApiError`` for a request without access; none of its body has been read then.
        body_bytes: maximum bytes of a body.
        errors: form of its errors.
    """

    method: str
    path: str
    handler: Handler
    admit: Admit | None = None
    body_bytes: int = 0
    errors: Callable[[ApiError], dict[str, Any]] = openai_form


class HttpServer:
    """An HTTP server on the caller's event loop; exceptions of handlers become JSON answers.

    Args:
        name: name in messages, such as "the policy server".
    """

    def __init__(self, name: str):
        self.name = name
        self.url = ""
        self._bodies = Bodies()
        self._most: dict[web.AbstractRoute, int] = {}
        """Maximum bytes of a body, by route."""
        self._forms: dict[web.AbstractRoute, Callable[[ApiError], dict[str, Any]]] = {}
        """Form of errors, by route."""
        self._hosts: set[str] = set()
        self._any_host = False
        self._runner: web.AppRunner | None = None
        self._said: set[str] = set()

    async def start(self, host: str, port: int, routes: Iterable[Route]) -> None:
        """Accepts requests. Raises ``UserError`` if the address is not available."""
        from aiohttp import web

        app = web.Application(middlewares=[self._guarded])
        app.on_response_prepare.append(_add_headers)
        for route in routes:
            added = app.router.add_route(route.method, route.path, _admitted(route), expect_handler=_expected)
            self._most[added], self._forms[added] = route.body_bytes, route.errors
        # Compressed bodies would be unpacked as they arrive, before anybody has asked for them.
        settings: dict[str, Any] = {"handler_cancellation": True, "auto_decompress": False, "lingering_time": LINGER_S}
        runner = web.AppRunner(app, access_log=None, logger=_clients(), **settings)
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

    async def body_of(self, request: web.Request) -> Body:
        """Returns the body, within the limit of its route: see ``Bodies.read``."""
        return await self._bodies.read(request, self._most[request.match_info.route])

    async def bytes_of(self, request: web.Request) -> bytes:
        """Returns a body that is not JSON, within the limit of its route. Raises ``ApiError`` if it does not arrive."""
        return await self._bodies.read_bytes(request, self._most[request.match_info.route])

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
                told = error
            except web.HTTPException as error:
                told = ApiError(error.status, f"{request.method} {request.path}: {error.reason}", "not_found")
            except Exception as error:
                if (kind := type(error).__name__) not in self._said:
                    self._said.add(kind)
                    log.exception("%s failed in %s", self.name, request.match_info.handler.__name__)
                told = ApiError(500, f"{kind}: {' '.join(str(error).split())}", "internal_error")
            form = self._forms.get(request.match_info.route, openai_form)
            return web.json_response(form(told), status=told.status, headers=told.headers)

        return guarded


def _admitted(route: Route) -> Handler:
    @functools.wraps(route.handler)
    async def answer(request: web.Request) -> web.StreamResponse:
        if route.admit is not None:
            route.admit(request)
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise ApiError(415, "a body is sent as it is, without Content-Encoding", "unsupported_encoding")
        if (request.content_length or 0) > route.body_bytes:
            raise too_large(route.body_bytes)
        return await route.handler(request)

    return answer


def _clients() -> logging.Logger:
    """Answers clients that send something other than HTTP, without a line in the log."""
    logger = logging.getLogger(f"{__name__}.clients")
    logger.setLevel(logging.CRITICAL)
    return logger


async def _expected(request: web.Request) -> None:
    """Sends ``100 Continue`` to a client that waits for it, once its body is needed: ``Bodies``."""


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)


def check_key(request: web.Request, key: str) -> None:
    """Raises ``ApiError`` for any other key."""
    given = request.headers.get("Authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key")
    if given is None:
        told = "no API key is given: the header Authorization: Bearer KEY, or x-api-key: KEY"
        raise ApiError(401, told, "invalid_api_key")
    # Bytes that are no UTF-8 arrive as surrogates.
    if not compare_digest(given.encode(errors="surrogateescape"), key.encode()):
        raise ApiError(401, "a wrong API key", "invalid_api_key")
