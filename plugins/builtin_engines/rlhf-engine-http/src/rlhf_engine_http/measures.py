"""Metrics of the servers, each and together."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_engine_http.balance import BLOCK
from rlhf_engine_http.connection import NoAnswer, Refusal
from rlhf_engine_http.servers import Counts, Server
from rlhf_host import Metric

ASK_S = 5.0
"""Longest time in which a server tells its metrics."""


class Measures:
    """What happened since the last metrics."""

    def __init__(self) -> None:
        self.restarts = 0
        """Number of times that a server came back without the weights that it should have."""
        self.joined = 0
        """Number of servers that came beyond those of the start."""
        self.load_s = 0.0
        """Seconds in which the servers loaded weights, for which requests waited."""
        self.load_bytes = 0
        """Bytes that were sent to servers."""
        self._left: list[tuple[str, Counts, dict[str, float]]] = []
        self._gone = 0

    def sent(self, server: Server, chain: Sequence[int], tokens: int) -> None:
        """Counts a request that a server gets; ``chain`` and ``tokens`` are of its prompt."""
        counts = server.counts
        counts.prompt_tokens += tokens
        counts.known_tokens += min(tokens, server.prefixes.known(chain) * BLOCK)
        counts.most_open = max(counts.most_open, server.open)

    def left(self, server: Server) -> None:
        """Counts a server that was let go."""
        self._gone += 1
        self._left.append((server.url, server.counts, {}))

    async def ask(self, server: Server) -> None:
        """Asks a server for its own metrics, if it has such."""
        try:
            told = server.dialect.told(await server.connection.text("/metrics", timeout_s=ASK_S))
        except (NoAnswer, Refusal, ValueError):
            return
        server.counts.waiting = max(server.counts.waiting, told.get("waiting", 0.0))
        server.now = told

    def taken(self, servers: Sequence[Server]) -> list[Metric]:
        """Returns the metrics, and begins anew."""
        rows = [*self._left]
        for server in servers:
            rows.append((server.url, server.counts, _since(server.told, server.now)))
            server.told, server.counts = server.now, Counts(most_open=server.open)
        values: dict[str, float] = {
            "servers": sum(server.state == "serving" and not server.leaving for server in servers),
            "servers_joined": self.joined,
            "servers_left": self._gone,
            "restarts": self.restarts,
            "resent": sum(counts.failures for _, counts, _ in rows),
        }
        if prompts := sum(counts.prompt_tokens for _, counts, _ in rows):
            values["prefix_known"] = sum(counts.known_tokens for _, counts, _ in rows) / prompts
        if prompts := sum(told.get("prompt", 0.0) for *_, told in rows):
            values["prefix_cached"] = sum(told.get("cached", 0.0) for *_, told in rows) / prompts
        if self.load_s:
            values |= {"load_s": self.load_s, "load_gb": self.load_bytes / 1e9}
        for url, counts, told in rows:
            values |= {f"{_short(url)}/{name}": value for name, value in _of(counts, told).items()}
        self._left, self._gone, self.joined, self.restarts, self.load_s, self.load_bytes = [], 0, 0, 0, 0.0, 0
        return [Metric(name, float(value)) for name, value in values.items()]


def _of(counts: Counts, told: dict[str, float]) -> dict[str, float]:
    values: dict[str, float] = {"requests": counts.requests, "tokens": counts.tokens, "open": counts.most_open}
    if "waiting" in told:
        values["waiting"] = counts.waiting
    if counts.prompt_tokens:
        values["prefix_known"] = counts.known_tokens / counts.prompt_tokens
    if told.get("prompt"):
        values["prefix_cached"] = told.get("cached", 0.0) / told["prompt"]
    return values


def _since(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    """Returns what counters grew by; those of a server that was started again began at 0."""
    restarted = any(now[name] < before.get(name, 0.0) for name in ("prompt", "cached") if name in now)
    return {name: value - (0.0 if restarted else before.get(name, 0.0)) for name, value in now.items()}


def _short(url: str) -> str:
    """Returns an address as a part of a metric's name."""
    return url.partition("://")[2].replace("/", "-").replace(":", "-")
