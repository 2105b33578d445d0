"""The HTTP server that Prometheus reads, and what it knows of who reads."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

LOOK_S = 0.05
"""Seconds between two looks whether the server should end, or was read."""


class Endpoint:
    """A server for one collector, in threads of its own. Raises ``OSError`` if it cannot listen there."""

    def __init__(self, collector: Collector, host: str, port: int):
        registry = CollectorRegistry()
        registry.register(collector)
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        kind = type("Server", (_Server,), {"address_family": family})
        self._server: WSGIServer = make_server(str(where[0]), port, self._noting(make_wsgi_app(registry)), kind, _Quiet)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._server.server_port}/metrics"
        self._readings: deque[float] = deque(maxlen=5)
        """Times at which the last ones began that were sent as a whole."""
        self._thread = threading.Thread(target=self._server.serve_forever, args=(LOOK_S,), daemon=True, name="prometheus")
        self._thread.start()

    def expected_s(self, most: float) -> float:
        """Returns the longest wait for the next reading, at most ``most`` seconds; 0 where nobody reads regularly (any more)."""
        readings = list(self._readings)
        if len(readings) < 2:
            return 0.0
        between = max(later - earlier for earlier, later in pairwise(readings))
        return max(0.0, min(most, readings[-1] + 2 * between - time.monotonic()))

    async def read_once_more(self, wait_s: float) -> None:
        """Waits until somebody has read what is there now, and closes."""
        now = time.monotonic()
        try:
            while self._readings[-1] < now and time.monotonic() < now + wait_s:
                await asyncio.sleep(LOOK_S)
        finally:
            self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _noting(self, app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
        def noting(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            began = time.monotonic()
            return _Noted(app(environ, start_response), lambda: self._readings.append(began))

        return noting


class _Noted(list[bytes]):
    """An answer that calls a function when it was sent."""

    def __init__(self, parts: Iterable[bytes], sent: Callable[[], None]):
        super().__init__(parts)
        self.close = sent


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    timeout = 30.0

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""
