"""The servers as one: which gets a request, what is done when one goes, and how all get new weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf_engine_http.answers import Aborted, Expected, Wrong, checked
from rlhf_engine_http.connection import Connection, NoAnswer, Refusal
from rlhf_engine_http.dialects import DIALECTS, TOP, Dialect, Facts
from rlhf_host import Generation, RunError, Sampling, UserError
from rlhf_host.engines import Request

log = logging.getLogger(__name__)

PAUSE_S = 0.5
"""Seconds before a request is sent again; twice as many before each further time, up to ``PAUSES_S``."""
PAUSES_S = 10.0
LOOK_S = 2.0
"""Seconds between two looks at a server that does not answer."""
LINE_S = 15.0
"""Seconds between two lines about it."""
BEAT_S = 10.0
"""Seconds between two looks at servers that have requests; one that is silent twice is given up."""
SILENT_S = 30.0
"""Seconds after which a server that is looked at counts as silent."""
HOMES = 100_000
"""Number of groups whose server is remembered."""
GAPS = {True: 1e-3, False: 0.1}
"""Nats by which servers with the same weights may differ, on average: where both compute in 32 bits, and else."""
OURS = "rlhf-"
"""Beginning of the names of weights that runs have brought."""
SHAPES = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)
"""Names in a model's configuration that tell it from others."""


@dataclass(frozen=True, slots=True)
class Model:
    """What servers must have in common with the run's model."""

    name: str
    """Its name or directory, for commands."""
    vocabulary: int
    context_length: int | None
    ends: frozenset[int]
    shape: dict[str, Any]
    """Values of ``SHAPES`` in its configuration."""
    probe: Sequence[int]
    """A prompt on which servers are compared."""


@dataclass(slots=True)
class Weights:
    """Weights that all servers should have."""

    directory: Path
    version: int
    label: str
    likeliest: dict[int, float] | None = None
    """Log-probabilities of tokens after the probe, by the first server that had these weights."""
    exact: bool = False
    """That server's ``Facts.exact``."""
    source: str = ""
    """Its address."""


@dataclass(eq=False, slots=True)
class Server:
    connection: Connection
    dialect: Dialect
    facts: Facts
    state: Literal["serving", "behind", "down"] = "behind"
    """``behind``: it is up, and has other weights than it should."""
    open: int = 0
    trouble: str = ""
    """What is wrong while it is down."""
    watch: asyncio.Task[None] | None = field(default=None, repr=False)
    calls: set[asyncio.Future[Any]] = field(default_factory=set, repr=False)
    """Requests that wait for its answers."""
    misses: int = 0
    """Number of looks in a row at which it was silent."""

    @property
    def url(self) -> str:
        return self.connection.url


class Fleet:
    """Servers under one event loop, on which everything here is called."""

    def __init__(self, options: Any, urls: Sequence[str], key: str | None, model: Model):
        self.options, self.model = options, model
        self._connections = [Connection(url, key) for url in urls]
        self.servers: list[Server] = []
        self.weights: Weights | None = None
        self.unanswered = 0
        self.restarts = 0
        """Number of times that a server came back with other weights."""
        self._run = uuid.uuid4().hex[:8]
        self._homes: dict[Hashable, Server] = {}
        self._changed = asyncio.Condition()
        """Notified when a server comes or goes, and when no request is left."""
        self._room = asyncio.Condition()
        """Notified when a server may have room for a request."""
        self._beats: asyncio.Task[None] | None = None
        self._loading = asyncio.Lock()
        self._out_since: float | None = None
        self._closed = False

    async def start(self) -> None:
        """Looks at every server. Raises ``UserError`` for one that does not answer, or does not fit."""
        found = await asyncio.gather(*map(self._meet, self._connections), return_exceptions=True)
        for one in found:
            if isinstance(one, BaseException):
                raise one
        self.servers = [one for one in found if isinstance(one, Server)]
        self._out_since = time.monotonic()
        self._beats = asyncio.ensure_future(self._beat())

    @property
    def context_length(self) -> int:
        lengths = [server.facts.context_length for server in self.servers]
        return min(lengths if self.model.context_length is None else [*lengths, self.model.context_length])

    @property
    def exact(self) -> bool:
        return all(server.facts.exact for server in self.servers)

    async def generate(self, request: Request) -> Generation:
        """Returns one completion under the present weights.

        Raises:
            UserError: the servers cannot serve the request.
            RunError: no server answered in time, or one answered with something wrong.
        """
        failures: Counter[str] = Counter()
        self.unanswered += 1
        try:
            while True:
                server = await self._take(request)
                try:
                    return await self._ask(server, request)
                except NoAnswer as error:
                    await self._doubt(server, error)
                    failures[server.url] += 1
                    if failures[server.url] > self.options.retries:
                        raise RunError(
                            f"engine http: a request failed {failures[server.url]} times (--engine.retries): {error}"
                        ) from error
                    await asyncio.sleep(min(PAUSE_S * 2 ** (failures[server.url] - 1), PAUSES_S))
                finally:
                    server.open -= 1
                    async with self._room:
                        self._room.notify()
        finally:
            self.unanswered -= 1
            if not self.unanswered:
                await self._tell()

    async def bring(self, directory: Path, version: int) -> None:
        """Has all servers load the weights in ``directory``, when no request is unanswered. A server that is down gets them when
        it answers again; if none is up, this waits.

        Raises:
            RunError: a server refused them, or has others than another server; or none was up in time.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self.unanswered == 0)
        async with self._loading:
            self.weights = Weights(directory, version, f"{OURS}{self._run}-{version}")
            for server in self.servers:
                if server.state == "serving":
                    server.state = "behind"
            up = [server for server in self.servers if server.state == "behind"]
            self._out_since = time.monotonic()
            results = await asyncio.gather(*map(self._load, up), return_exceptions=True)
        for server, result in zip(up, results, strict=True):
            if isinstance(result, NoAnswer):
                await self._doubt(server, result)
                if server.state != "down":
                    raise RunError(f"engine http: loading version {version} failed: {result}") from result
            elif isinstance(result, UserError | Refusal):
                raise RunError(f"engine http: {server.url} did not load version {version}: {result}") from result
            elif isinstance(result, BaseException):
                raise result
        await self._tell()
        await self._any_serving()

    async def close(self) -> None:
        """Closes the connections. Whoever calls it has cancelled what waits."""
        self._closed = True
        for connection in self._connections:
            await connection.close()

    async def _take(self, request: Request) -> Server:
        """Waits for a server with room; it counts one open request more. A group's requests go to one server, which has their
        prompt cached.
        """
        group = request.key[:-2]
        while True:
            await self._any_serving()
            able = [each for each in self.servers if each.state == "serving" and each.open < self.options.at_once]
            if able:
                home = self._homes.pop(group, None)
                server = home if home in able else min(able, key=lambda each: each.open)
                self._homes[group] = server
                if len(self._homes) > HOMES:
                    del self._homes[next(iter(self._homes))]
                server.open += 1
                return server
            async with self._room:
                await self._room.wait()

    async def _any_serving(self) -> None:
        while not any(server.state == "serving" for server in self.servers):
            if self._closed:
                raise RunError("engine http is closed")
            since = self._out_since = self._out_since or time.monotonic()
            if time.monotonic() - since > self.options.wait_s:
                raise RunError(
                    f"engine http: no server was usable for {self.options.wait_s:g} s (--engine.wait-s):"
                    f" {'; '.join(f'{each.url}: {each.trouble or each.state}' for each in self.servers)}."
                    f" Start them with: {self._command(self.servers[0].dialect, self.servers[0].url)}"
                )
            async with self._changed:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(LOOK_S, self.options.wait_s)):
                        await self._changed.wait()
        if self._closed:
            raise RunError("engine http is closed")
        self._out_since = None

    async def _tell(self) -> None:
        for condition in (self._changed, self._room):
            async with condition:
                condition.notify_all()

    async def _ask(self, server: Server, request: Request) -> Generation:
        weights, sampling = self.weights, request.sampling
        assert weights is not None
        if sampling.truncates and not server.dialect.truncates:
            raise UserError(
                f"engine http: the log-probabilities of {server.dialect.name} are not of what top_p, top_k and min_p leave;"
                " leave them out"
            )
        most = min(sampling.max_new_tokens, self.context_length - len(request.token_ids))
        body = server.dialect.body(request, most, sorted(self.model.ends), seeded=self.options.seeds)
        try:
            reply = await self._call(server, body)
            answer = _read(server, reply)
            if answer.labels != {weights.label}:
                await self._restarted(server, answer.labels)
                raise NoAnswer(f"{server.url} has other weights than version {weights.version}")
            tokens, logprobs, reason = checked(answer, request, Expected(self.model.vocabulary, self.model.ends, most))
        except Aborted as error:
            raise NoAnswer(f"{server.url} gave the request up") from error
        except Wrong as error:
            raise RunError(f"engine http: {server.url} answered with something wrong: {error}") from error
        except Refusal as error:
            raise UserError(f"engine http: {error}") from error
        return Generation(tokens, logprobs, [weights.version] * len(tokens), reason)  # type: ignore[arg-type]

    async def _call(self, server: Server, body: dict[str, Any]) -> Any:
        """Returns the server's answer. Raises ``NoAnswer`` when the server is given up meanwhile."""
        call = asyncio.ensure_future(server.connection.post(server.dialect.generate, body, timeout_s=self.options.timeout_s))
        server.calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if server.state == "down" and not (task is not None and task.cancelling()):
                raise NoAnswer(server.trouble) from None
            raise
        finally:
            call.cancel()
            server.calls.discard(call)

    async def _beat(self) -> None:
        """Looks at servers that have requests: one whose machine is gone, or that hangs, would be waited for without end."""
        while True:
            await asyncio.sleep(BEAT_S)
            await asyncio.gather(*(self._look(server) for server in self.servers if server.state == "serving" and server.open))

    async def _look(self, server: Server) -> None:
        try:
            await server.connection.get(server.dialect.health, timeout_s=SILENT_S)
        except (NoAnswer, Refusal) as error:
            server.misses += 1
            if server.misses > 1:
                await self._down(server, str(error))
        else:
            server.misses = 0

    async def _restarted(self, server: Server, labels: frozenset[str]) -> None:
        """Notes that a server has other weights than it should; it gets no request until it has them again."""
        assert self.weights is not None
        if others := sorted(label for label in labels if label.startswith(OURS) and self._run not in label):
            raise RunError(f"engine http: another run gave its weights to {server.url} ({others[0]}): no server can serve two")
        await self._down(server, f"it was started again, without the weights of version {self.weights.version}")

    async def _doubt(self, server: Server, error: NoAnswer) -> None:
        """Notes that a server is down, if it is; one that merely failed may go on."""
        gone = error.gone
        if not gone:
            try:
                await server.connection.get(server.dialect.health, timeout_s=10.0)
            except (NoAnswer, Refusal):
                gone = True
        if gone:
            await self._down(server, str(error))

    async def _down(self, server: Server, trouble: str) -> None:
        if server.state == "down" or self._closed:
            return
        server.state, server.trouble, server.misses = "down", trouble, 0
        others = sum(each.state == "serving" for each in self.servers)
        left = f"requests go to {others} other servers" if others else f"requests wait, up to {self.options.wait_s:g} s"
        log.warning("engine http: %s is left out (%s); %s", server.url, trouble, left)
        for call in list(server.calls):
            call.cancel()
        if server.watch is None or server.watch.done():
            server.watch = asyncio.ensure_future(self._watch(server))
        await self._tell()

    async def _watch(self, server: Server) -> None:
        """Waits until a server answers again, and brings it up to date."""
        since = shown = time.monotonic()
        while not self._closed:
            try:
                await server.connection.get(server.dialect.health, timeout_s=10.0)
                async with self._loading:
                    await self._bring_up(server)
            except (NoAnswer, Refusal, UserError, RunError) as error:
                server.trouble = str(error)
                if time.monotonic() - shown > LINE_S:
                    shown = time.monotonic()
                    log.warning(
                        "engine http: %s is left out for %.0f s, %d requests are unanswered: %s",
                        server.url,
                        shown - since,
                        self.unanswered,
                        error,
                    )
                await asyncio.sleep(LOOK_S)
                continue
            server.trouble = ""
            await self._tell()
            return

    async def _bring_up(self, server: Server) -> None:
        fresh = await self._meet(server.connection)
        server.dialect, server.facts = fresh.dialect, fresh.facts
        if self.weights is None:
            server.state = "behind"
            return
        if await server.dialect.label(server.connection) != self.weights.label:
            self.restarts += 1
        await self._load(server)
        log.warning("engine http: %s has the weights of version %d, and serves", server.url, self.weights.version)

    async def _load(self, server: Server) -> None:
        """Brings the weights to one server, unless it has them, and compares it with the others."""
        weights, dialect, connection = self.weights, server.dialect, server.connection
        assert weights is not None
        try:
            if await dialect.label(connection) != weights.label:
                await dialect.load(connection, weights.directory, weights.label, self.options.load_s)
            if (label := await dialect.label(connection)) != weights.label:
                raise UserError(f"it calls its weights {label!r} after loading {weights.label!r}")
            likeliest = await self._likeliest(server, 1.0)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"it answered outside of its protocol ({type(error).__name__}: {error})") from error
        if weights.likeliest is None:
            weights.likeliest, weights.exact, weights.source = likeliest, server.facts.exact, server.url
        else:
            gap, most = _gap(likeliest, weights.likeliest), GAPS[server.facts.exact and weights.exact]
            if not gap <= most:
                raise UserError(
                    f"its log-probabilities of a probe differ by {gap:.2g}, on average, from those of {weights.source}, which"
                    f" loaded the same files of version {weights.version}"
                )
        server.state = "serving"

    async def _meet(self, connection: Connection) -> Server:
        """Returns a server that fits. Raises ``UserError`` for another, and for none."""
        dialect = DIALECTS.get(self.options.protocol)
        try:
            dialect = dialect or await _detected(connection)
            server = Server(connection, dialect, await dialect.facts(connection))
            await self._examine(server)
        except (NoAnswer, Refusal, UserError, Wrong, Aborted) as error:
            raise UserError(self._advice(connection.url, dialect, str(error) or "it gave a request up")) from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            name = dialect.name if dialect else "no known"
            why = f"it does not answer as a {name} server does ({type(error).__name__}: {error})"
            raise UserError(self._advice(connection.url, dialect, why)) from error
        return server

    def _advice(self, url: str, dialect: Dialect | None, why: str) -> str:
        known = [dialect] if dialect else list(DIALECTS.values())
        commands = ", or ".join(self._command(each, url) for each in known)
        return f"engine http cannot use {url}: {why.removeprefix(url + ' ')}. Start it with: {commands}"

    def _command(self, dialect: Dialect, url: str) -> str:
        return dialect.command(self.model.name, url)

    async def _examine(self, server: Server) -> None:
        """Asks a server for some tokens. Raises ``UserError`` unless it has the run's vocabulary and shape, tells the right
        log-probabilities, names its weights, and follows seeds.
        """
        model = self.model
        self._compare_shapes(server)
        if server.dialect.bounded:
            _read(server, await self._post(server, [model.vocabulary - 1], 1))
            try:
                await self._post(server, [model.vocabulary], 1)
            except Refusal:
                pass
            else:
                raise UserError(f"it has more tokens than the {model.vocabulary} of the run's model: it serves another one")
        warm, cold = await self._likeliest(server, 1.0), await self._likeliest(server, 0.5)
        both = sorted(warm.keys() & cold.keys(), key=lambda token: -warm[token])
        if len(both) < min(2, model.vocabulary):
            raise UserError("it does not tell the likeliest tokens")
        spread, colder = warm[both[0]] - warm[both[-1]], cold[both[0]] - cold[both[-1]]
        if abs(colder - 2 * spread) > abs(colder - spread):
            raise UserError("its log-probabilities do not depend on the temperature: they are not those of what is drawn from")
        if self.options.seeds:
            drawn = [_read(server, await self._post(server, model.probe, 16)).token_ids for _ in range(2)]
            if drawn[0] != drawn[1]:
                raise UserError("a seed does not decide what it draws (start it as below, or --engine.seeds false)")

    def _compare_shapes(self, server: Server) -> None:
        """Compares the configuration of the server's model with the run's, where it can be read here."""
        try:
            theirs = json.loads(Path(server.facts.model, "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        for name in SHAPES:
            if name in theirs and (own := self.model.shape.get(name)) is not None and theirs[name] != own:
                raise UserError(
                    f"its model {server.facts.model} has {name} {theirs[name]}, and the run's {own}: it is another one"
                )

    async def _post(self, server: Server, ids: Sequence[int], most: int, temperature: float = 1.0, top: int = 0) -> Any:
        request = Request.of(ids, Sampling(most, temperature), (0, 0))
        body = server.dialect.body(request, most, [], seeded=self.options.seeds, top=top)
        return await server.connection.post(server.dialect.generate, body, timeout_s=self.options.load_s)

    async def _likeliest(self, server: Server, temperature: float) -> dict[int, float]:
        reply = await self._post(server, self.model.probe, 1, temperature, TOP)
        return server.dialect.likeliest(reply)


def _read(server: Server, reply: Any) -> Any:
    try:
        return server.dialect.answer(reply)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        text = " ".join(str(error).split())
        raise Wrong(f"it is no answer of {server.dialect.name} ({type(error).__name__}: {text})") from error


def _gap(one: dict[int, float], other: dict[int, float]) -> float:
    both = one.keys() & other.keys()
    if 2 * len(both) < min(len(one), len(other)):
        return float("inf")
    return sum(abs(one[token] - other[token]) for token in both) / len(both)


async def _detected(connection: Connection) -> Dialect:
    """Returns the protocol that a server speaks."""
    try:
        await connection.get("/get_model_info")
    except Refusal as error:
        if error.status in (401, 403):
            raise
        return DIALECTS["vllm"]
    return DIALECTS["sglang"]
