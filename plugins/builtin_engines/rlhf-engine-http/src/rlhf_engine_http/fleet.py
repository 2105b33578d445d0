"""The servers as one: who belongs to it, who gets a request, what is done when one goes, and how all get new weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from rlhf_engine_http.addresses import ServerFile
from rlhf_engine_http.answers import OTHER_FORM, Aborted, Expected, Wrong, checked
from rlhf_engine_http.balance import Balance, chain_of
from rlhf_engine_http.connection import Connection, NoAnswer, Refusal
from rlhf_engine_http.dialects import DIALECTS
from rlhf_engine_http.measures import Measures
from rlhf_engine_http.meeting import HEALTH, Meeting, Unreachable, read
from rlhf_engine_http.servers import Model, Newcomer, Server, Weights
from rlhf_engine_http.weights import Stored
from rlhf_host import Generation, Metric, RunError, UserError
from rlhf_host.engines import Request

log = logging.getLogger(__name__)

PAUSE_S = 0.5
"""Seconds before a request is sent again; twice as many before each further time, up to ``PAUSES_S``."""
PAUSES_S = 10.0
LOOK_S = 2.0
"""Seconds between two looks at a server that does not answer, and at the file of servers."""
LINE_S = 15.0
"""Seconds between two lines about what is missing."""
BEAT_S = 10.0
"""Seconds between two looks at servers that have requests; one that is silent twice is given up."""
SILENT_S = 30.0
"""Seconds after which a server that is looked at counts as silent."""
GAPS = {True: 1e-3, False: 0.1}
"""Nats by which servers with the same weights may differ, on average: where both compute in 32 bits, and else."""
OURS = "rlhf-"
"""Beginning of the names of weights that runs have brought."""


class Fleet:
    """Servers under one event loop, on which everything here is called.

    Args:
        urls: addresses of the command line.
        listed: a file with more of them, or without any.
    """

    def __init__(self, options: Any, urls: Sequence[str], listed: ServerFile | None, key: str | None, model: Model):
        self.options, self.model = options, model
        self.meeting = Meeting(options, model)
        self.servers: list[Server] = []
        self.weights: Weights | None = None
        self.unanswered = 0
        self.context_length = 0
        """Of a row, in tokens: what the model and the servers at the start have."""
        self.exact = False
        """True if all servers compute in 32 bits."""
        self._kind = ""
        """The dialect's name of the servers at the start."""
        self.measures = Measures()
        self._urls, self._listed, self._key = list(urls), listed, key
        self._newcomers: dict[str, Newcomer] = {}
        self._run = uuid.uuid4().hex[:8]
        self._balance = Balance()
        self._changed = asyncio.Condition()
        """Notified when a server comes or goes, and when no request is left."""
        self._room = asyncio.Condition()
        """Notified when a server may have room for a request."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._out_since: float | None = None
        self._out_said = 0.0
        self._closed = False

    async def start(self) -> None:
        """Looks at every server, and waits for the first one.

        Raises:
            UserError: one does not answer, though the command line names it; one does not fit; or none came in time.
        """
        connections = [Connection(url, self._key) for url in self._named()]
        found = await asyncio.gather(*map(self.meeting.meet, connections), return_exceptions=True)
        failure: BaseException | None = None
        for connection, one in zip(connections, found, strict=True):
            if isinstance(one, Server):
                self.servers.append(one)
            elif isinstance(one, Unreachable) and connection.url not in self._urls:
                log.warning("%s; the run begins without it", one)
                self._expect(connection, str(one))
            else:
                await connection.close()
                failure = failure or one
        if failure is not None:
            raise failure
        self._spawn(self._beat())
        if self._listed is not None:
            self._spawn(self._follow(self._listed))
        try:
            await self._until(lambda: bool(self.servers))
        except RunError as error:
            raise UserError(str(error)) from error
        if not self.context_length:
            self._agree(self.servers)

    def _agree(self, servers: Sequence[Server]) -> None:
        """Fixes what the run may expect of every server from now on."""
        lengths = [server.facts.context_length for server in servers]
        self.context_length = min(lengths if self.model.context_length is None else [*lengths, self.model.context_length])
        self.exact = all(server.facts.exact for server in servers)
        self._kind = servers[0].dialect.name
        for server in servers:
            try:
                self._check_suits(server)
            except UserError as error:
                raise UserError(f"engine http cannot use {server.url} beside {servers[0].url}: {error}") from error

    @property
    def need_files(self) -> bool:
        """True if a server reads weights from a directory, or one may that was not met yet."""
        if self.options.transfer == "stream":
            return False
        return bool(self._newcomers) or not all(map(self.meeting.streams, self.servers))

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
                    server.counts.failures += 1
                    await self._doubt(server, error)
                    failures[server.url] += 1
                    if failures[server.url] > self.options.retries:
                        raise RunError(
                            f"engine http: a request failed {failures[server.url]} times (--engine.retries): {error}"
                        ) from error
                    await asyncio.sleep(min(PAUSE_S * 2 ** (failures[server.url] - 1), PAUSES_S))
                finally:
                    await self._give_back(server)
        finally:
            self.unanswered -= 1
            if not self.unanswered:
                await self._tell()

    async def bring(self, stored: Stored, version: int) -> None:
        """Has all servers load weights, when no request is unanswered. A server that is down gets them when it answers again; if
        none is up, this waits.

        Raises:
            RunError: a server refused them, or has others than another server; or none was up in time.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self.unanswered == 0)
        started = time.monotonic()
        self.weights = Weights(stored, version, f"{OURS}{self._run}-{version}")
        for server in self.servers:
            server.prefixes.clear()
            if server.state == "serving":
                server.state = "behind"
        up = [server for server in self.servers if server.state == "behind" and not server.leaving]
        self._out_since = started
        results = await asyncio.gather(*map(self._load, up), return_exceptions=True)
        for server, result in zip(up, results, strict=True):
            if server.leaving and isinstance(result, NoAnswer | UserError | Refusal):
                continue
            if isinstance(result, NoAnswer):
                await self._doubt(server, result)
                if server.state != "down":
                    raise RunError(f"engine http: loading version {version} failed: {result}") from result
            elif isinstance(result, UserError | Refusal):
                raise RunError(f"engine http: {server.url} did not load version {version}: {result}") from result
            elif isinstance(result, BaseException):
                raise result
        for server in self.servers:
            if server.state == "behind" and not (server.leaving or server.loading):  # it was named again meanwhile
                server.watch = self._spawn(self._watch(server))
        await self._tell()
        await self._any_serving()
        self.measures.load_s += time.monotonic() - started

    async def metrics(self) -> list[Metric]:
        """Returns the metrics since the last call."""
        await asyncio.gather(*map(self.measures.ask, (server for server in self.servers if server.state == "serving")))
        return self.measures.taken(self.servers)

    async def close(self) -> None:
        """Closes the connections. Whoever calls it has cancelled what waits."""
        self._closed = True
        for connection in (each.connection for each in (*self.servers, *self._newcomers.values())):
            await connection.close()

    # Who belongs to it.

    def _named(self) -> list[str]:
        return self._urls + (self._listed.urls if self._listed is not None else [])

    async def _follow(self, listed: ServerFile) -> None:
        """Reads the file of servers again and again."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                changed = await asyncio.to_thread(listed.look)
            except UserError as error:
                log.warning("%s; the servers stay as they are", error)
                continue
            if changed:
                await self._name(self._named())

    async def _name(self, urls: Sequence[str]) -> None:
        """Brings the fleet to these addresses: others get no more requests, and new ones are met."""
        for url in self._newcomers.keys() - set(urls):
            newcomer = self._newcomers.pop(url)
            assert newcomer.task is not None
            newcomer.task.cancel()
            await newcomer.connection.close()
            log.warning("engine http: %s is not named any more, and never came (%s)", url, newcomer.trouble)
        for server in self.servers:
            if server.leaving == (server.url in urls):
                server.leaving = not server.leaving
                if server.leaving:
                    self._spawn(self._let_go(server))
                else:
                    log.warning("engine http: %s is named again, and stays", server.url)
        here = {server.url for server in self.servers} | self._newcomers.keys()
        for url in urls:
            if url not in here:
                log.warning("engine http: %s is new", url)
                self._expect(Connection(url, self._key))
        await self._tell()

    async def _let_go(self, server: Server) -> None:
        """Waits for the last answer of a server that is not named any more, and forgets it."""
        log.warning(
            "engine http: %s is not named any more; %d requests of it end, and it gets no other", server.url, server.open
        )
        if server.watch is not None:
            server.watch.cancel()
        async with self._changed:
            await self._changed.wait_for(lambda: not server.leaving or not (server.open or server.loading))
        if server not in self.servers:
            return
        if not server.leaving:
            if server.state == "down":
                server.watch = self._spawn(self._watch(server))
            return
        self.servers.remove(server)
        self.measures.left(server)
        await server.connection.close()
        log.warning("engine http: %s is let go; servers: %d", server.url, len(self.servers))
        await self._tell()

    def _expect(self, connection: Connection, trouble: str = "it was not asked yet") -> None:
        self._newcomers[connection.url] = newcomer = Newcomer(connection, trouble)
        newcomer.task = self._spawn(self._await(newcomer))

    async def _await(self, newcomer: Newcomer) -> None:
        """Waits until a new server answers, gives it the weights, and lets it serve."""
        connection = newcomer.connection

        async def meet() -> None:
            await connection.get(HEALTH, timeout_s=10.0)
            server = await self.meeting.meet(connection)
            if self.context_length:
                self._check_suits(server)
            else:
                self._agree([server])
            await self._load(server)
            del self._newcomers[connection.url]
            self.servers.append(server)
            self.measures.joined += 1

        def note(trouble: str) -> None:
            newcomer.trouble = trouble

        await self._persist(connection.url, meet, note)
        log.warning("engine http: %s joined%s; servers: %d", connection.url, self._under(), len(self.servers))
        await self._tell()

    def _check_suits(self, server: Server) -> None:
        """Raises ``UserError`` for a server that cannot stand beside those of the start; names one that quantizes."""
        if server.facts.context_length < self.context_length:
            raise UserError(f"its rows have {server.facts.context_length} tokens at most, and the run's {self.context_length}")
        if self.exact and not server.facts.exact:
            raise UserError("it does not compute in 32 bits, as the servers of the start do")
        if self.options.seeds and server.dialect.name != self._kind:
            raise UserError(
                f"it is a server of {server.dialect.name}, and those of {self._kind} draw other tokens from the same seed"
                " (--engine.seeds false)"
            )
        if server.facts.quantization:
            log.warning(
                "engine http: %s samples from weights that it quantizes (%s), and others are trained: mismatch/mean says how"
                " far they differ, and no proof here tells rounding from weights that it did not load",
                server.url,
                server.facts.quantization,
            )

    def _under(self) -> str:
        return "" if self.weights is None else f" with the weights of version {self.weights.version}"

    async def _persist(self, url: str, action: Callable[[], Awaitable[None]], note: Callable[[str], None]) -> None:
        """Tries something with a server until it succeeds, and says from time to time why it did not."""
        since = shown = time.monotonic()
        while True:
            try:
                return await action()
            except (NoAnswer, Refusal, UserError, RunError) as error:
                note(str(error))
                if time.monotonic() - shown > LINE_S:
                    shown = time.monotonic()
                    log.warning(
                        "engine http: %s is left out for %.0f s, %d requests are unanswered: %s",
                        url,
                        shown - since,
                        self.unanswered,
                        error,
                    )
                await asyncio.sleep(LOOK_S)

    # Who gets a request.

    async def _take(self, request: Request) -> Server:
        """Waits for a server with room; it counts one open request more."""
        chain = chain_of(request.token_ids)
        while True:
            await self._any_serving()
            serving = [server for server in self.servers if server.state == "serving" and not server.leaving]
            fitting = [server for server in serving if server.dialect.truncates or not request.sampling.truncates]
            if serving and not fitting:
                raise UserError(
                    f"engine http: the log-probabilities of {serving[0].dialect.name} are not of what top_p, top_k and min_p"
                    " leave; leave them out"
                )
            if able := [server for server in fitting if server.open < self.options.at_once]:
                # A key ends in the sample and its turn: the rest is the task's.
                server = able[self._balance.choose(able, request.key[:-2], chain)]
                server.open += 1
                self.measures.sent(server, chain, len(request.token_ids))
                server.prefixes.add(chain)
                return server
            async with self._room:
                await self._room.wait()

    async def _give_back(self, server: Server) -> None:
        server.open -= 1
        async with self._room:
            self._room.notify()
        if server.leaving:
            await self._tell()

    async def _any_serving(self) -> None:
        await self._until(lambda: any(server.state == "serving" and not server.leaving for server in self.servers))

    async def _until(self, usable: Callable[[], bool]) -> None:
        """Waits until there is what is needed. Raises ``RunError`` if there is none in time."""
        while not usable():
            if self._closed:
                raise RunError("engine http is closed")
            now = time.monotonic()
            since = self._out_since = self._out_since or now
            if now - since > self.options.wait_s:
                raise RunError(self._nobody())
            if not (self.servers or self._newcomers) and now - max(since, self._out_said) > LINE_S:
                self._out_said = now
                log.warning(
                    "engine http: %s names no server; %d requests wait, up to %g s",
                    self._listed.path if self._listed is not None else "nothing",
                    self.unanswered,
                    self.options.wait_s,
                )
            async with self._changed:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(LOOK_S, self.options.wait_s)):
                        await self._changed.wait()
        if self._closed:
            raise RunError("engine http is closed")
        self._out_since = None

    def _nobody(self) -> str:
        known = {server.url: server.trouble or str(server.state) for server in self.servers}
        known |= {url: newcomer.trouble for url, newcomer in self._newcomers.items()}
        troubles = [f"{url}: {trouble.removeprefix(f'{url} ')}" for url, trouble in known.items()]
        if not troubles and self._listed is not None:
            troubles = [f"{self._listed.path} (--engine.servers) names none"]
        dialect = self.servers[0].dialect if self.servers else DIALECTS.get(self.options.protocol, DIALECTS["vllm"])
        url = next((each.url for each in self.servers), next(iter(self._newcomers), "http://127.0.0.1:8000"))
        return (
            f"engine http: no server was usable for {self.options.wait_s:g} s (--engine.wait-s): {'; '.join(troubles)}. Start"
            f" them with: {self.meeting.command(dialect, url)}"
        )

    async def _tell(self) -> None:
        for condition in (self._changed, self._room):
            async with condition:
                condition.notify_all()

    async def _ask(self, server: Server, request: Request) -> Generation:
        weights, sampling = self.weights, request.sampling
        assert weights is not None
        most = min(sampling.max_new_tokens, self.context_length - len(request.token_ids))
        body = server.dialect.body(request, most, sorted(self.model.ends), seeded=self.options.seeds)
        try:
            reply = await self._call(server, body)
            answer = read(server, reply)
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
        server.prefixes.add(chain_of([*request.token_ids, *tokens]))
        server.counts.requests += 1
        server.counts.tokens += len(tokens)
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

    # What is done when one goes.

    async def _beat(self) -> None:
        """Looks at servers that have requests: one whose machine is gone, or that hangs, would be waited for without end."""
        while True:
            await asyncio.sleep(BEAT_S)
            busy = [server for server in self.servers if server.state == "serving" and server.open]
            await asyncio.gather(*map(self._look, busy))

    async def _look(self, server: Server) -> None:
        try:
            await server.connection.get(HEALTH, timeout_s=SILENT_S)
        except (NoAnswer, Refusal) as error:
            server.misses += 1
            if server.misses > 1:
                await self._down(server, str(error))
        else:
            server.misses = 0
            await self.measures.ask(server)

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
                await server.connection.get(HEALTH, timeout_s=10.0)
            except (NoAnswer, Refusal):
                gone = True
        if gone:
            await self._down(server, str(error))

    async def _down(self, server: Server, trouble: str) -> None:
        if server.state == "down" or self._closed:
            return
        server.state, server.trouble, server.misses = "down", trouble, 0
        server.prefixes.clear()
        others = sum(each.state == "serving" and not each.leaving for each in self.servers)
        left = f"requests go to {others} other servers" if others else f"requests wait, up to {self.options.wait_s:g} s"
        log.warning("engine http: %s is left out (%s); %s", server.url, trouble, left)
        for call in list(server.calls):
            call.cancel()
        if not server.leaving and (server.watch is None or server.watch.done()):
            server.watch = self._spawn(self._watch(server))
        await self._tell()

    async def _watch(self, server: Server) -> None:
        """Waits until a server answers again, and brings it up to date."""

        async def bring_up() -> None:
            await server.connection.get(HEALTH, timeout_s=10.0)
            fresh = await self.meeting.meet(server.connection)
            self._check_suits(fresh)
            server.dialect, server.facts = fresh.dialect, fresh.facts
            await self._load(server)

        def note(trouble: str) -> None:
            server.trouble = trouble

        await self._persist(server.url, bring_up, note)
        server.trouble = ""
        if self.weights is not None:
            log.warning("engine http: %s has the weights of version %d, and serves", server.url, self.weights.version)
        await self._tell()

    # How they get weights.

    async def _load(self, server: Server) -> None:
        """Brings the newest weights to a server; it serves when it has them. A sync that comes meanwhile does not wait for it."""
        server.loading = True
        try:
            while (weights := self.weights) is not None:
                await self._load_these(server, weights)
                if weights is self.weights:
                    break
        finally:
            server.loading = False
            if server.leaving:
                await self._tell()
        server.prefixes.clear()
        server.state = "serving" if weights is not None else "behind"

    async def _load_these(self, server: Server, weights: Weights) -> None:
        """Brings weights to one server, unless it has them, and compares it with the others."""
        dialect, connection = server.dialect, server.connection
        try:
            if await dialect.label(connection) != weights.label:
                self.measures.restarts += server.state == "down"
                streamed = await dialect.load(
                    connection, weights.stored, weights.label, self.options.load_s, streams=self.meeting.streams(server)
                )
                self.measures.load_bytes += streamed
            if (label := await dialect.label(connection)) != weights.label:
                raise UserError(f"it calls its weights {label!r} after loading {weights.label!r}")
            likeliest = await self.meeting.likeliest(server)
        except OTHER_FORM as error:
            raise UserError(f"it answered outside of its protocol ({type(error).__name__}: {error})") from error
        if weights.likeliest is None:
            weights.likeliest, weights.exact, weights.source = likeliest, server.facts.exact, server.url
        else:
            gap, most = _gap(likeliest, weights.likeliest), GAPS[server.facts.exact and weights.exact]
            if not gap <= most:
                raise UserError(
                    f"its log-probabilities of a probe differ by {gap:.2g}, on average, from those of {weights.source}, which"
                    f" loaded the same weights of version {weights.version}"
                )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _gap(one: dict[int, float], other: dict[int, float]) -> float:
    both = one.keys() & other.keys()
    if 2 * len(both) < min(len(one), len(other)):
        return float("inf")
    return sum(abs(one[token] - other[token]) for token in both) / len(both)
