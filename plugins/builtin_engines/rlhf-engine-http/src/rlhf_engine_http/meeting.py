"""The first look at a server: whether it fits the run, and how it should have been started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_engine_http.answers import OTHER_FORM, Aborted, Answer, Wrong
from rlhf_engine_http.connection import Connection, NoAnswer, Refusal
from rlhf_engine_http.dialects import DIALECTS, TOP, Dialect
from rlhf_engine_http.servers import SHAPES, Model, Server
from rlhf_engine_http.stream import unfit
from rlhf_engine_http.vllm_plugin import BACKEND
from rlhf_host import Sampling, UserError
from rlhf_host.engines import Request

HEALTH = "/health"
"""Path at which vLLM and SGLang say that they are up."""


class Unreachable(UserError):
    """Nothing answers at the address, or nothing that is ready."""


class Meeting:
    """Examines servers for one run."""

    def __init__(self, options: Any, model: Model):
        self.options, self.model = options, model

    async def meet(self, connection: Connection) -> Server:
        """Returns a server that fits.

        Raises:
            Unreachable: there is none, or it is not ready.
            UserError: it does not fit.
        """
        dialect = DIALECTS.get(self.options.protocol)
        try:
            dialect = dialect or await _detected(connection)
            server = Server(connection, dialect, await dialect.facts(connection))
            await self._examine(server)
        except NoAnswer as error:
            raise Unreachable(self._advice(connection.url, dialect, str(error))) from error
        except (Refusal, UserError, Wrong, Aborted) as error:
            raise UserError(self._advice(connection.url, dialect, str(error) or "it gave a request up")) from error
        except OTHER_FORM as error:
            name = dialect.name if dialect else "no known"
            why = f"it does not answer as a {name} server does ({type(error).__name__}: {error})"
            raise UserError(self._advice(connection.url, dialect, why)) from error
        return server

    def command(self, dialect: Dialect, url: str) -> str:
        """Returns the command that starts a fitting server."""
        return dialect.command(self.model.name, url, BACKEND if self.options.transfer == "stream" else None)

    def streams(self, server: Server) -> bool:
        """Returns True if weights are sent to a server, False if it reads a directory."""
        return self.options.transfer != "files" and server.dialect.transfers and server.facts.transfer == BACKEND

    async def likeliest(self, server: Server, temperature: float = 1.0) -> dict[int, float]:
        """Returns the likeliest tokens after the probe, and their log-probabilities."""
        reply = await self._post(server, self.model.probe, 1, temperature, TOP)
        return server.dialect.likeliest(reply)

    def _advice(self, url: str, dialect: Dialect | None, why: str) -> str:
        known = [dialect] if dialect else list(DIALECTS.values())
        commands = ", or ".join(self.command(each, url) for each in known)
        return f"engine http cannot use {url}: {why.removeprefix(url + ' ')}. Start it with: {commands}"

    async def _examine(self, server: Server) -> None:
        """Asks a server for some tokens. Raises ``UserError`` unless it has the run's vocabulary and shape, tells the right
        log-probabilities, names its weights, follows seeds, and takes weights in the way that the run sends them.
        """
        model = self.model
        if self.options.transfer == "stream" and not self.streams(server):
            raise UserError(unfit(server.facts.transfer))
        self._compare_shapes(server)
        if server.dialect.bounded:
            read(server, await self._post(server, [model.vocabulary - 1], 1))
            try:
                await self._post(server, [model.vocabulary], 1)
            except Refusal:
                pass
            else:
                raise UserError(f"it has more tokens than the {model.vocabulary} of the run's model: it serves another one")
        warm, cold = await self.likeliest(server), await self.likeliest(server, 0.5)
        both = sorted(warm.keys() & cold.keys(), key=lambda token: -warm[token])
        if len(both) < min(2, model.vocabulary):
            raise UserError("it does not tell the likeliest tokens")
        spread, colder = warm[both[0]] - warm[both[-1]], cold[both[0]] - cold[both[-1]]
        if abs(colder - 2 * spread) > abs(colder - spread):
            raise UserError("its log-probabilities do not depend on the temperature: they are not those of what is drawn from")
        if self.options.seeds:
            drawn = [read(server, await self._post(server, model.probe, 16)).token_ids for _ in range(2)]
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


def read(server: Server, reply: Any) -> Answer:
    """Returns a reply's ``Answer``. Raises ``Wrong`` for one that is none."""
    try:
        answer = server.dialect.answer(reply)
        if other := [label for label in answer.labels if not isinstance(label, str)]:
            raise TypeError(f"its weights are called {other[0]!r:.40}, which is no text")
    except OTHER_FORM as error:
        text = " ".join(str(error).split())
        raise Wrong(f"it is no answer of {server.dialect.name} ({type(error).__name__}: {text:.200})") from error
    return answer


async def _detected(connection: Connection) -> Dialect:
    """Returns the protocol that a server speaks."""
    try:
        await connection.get("/get_model_info")
    except Refusal as error:
        if error.status in (401, 403):
            raise
        return DIALECTS["vllm"]
    return DIALECTS["sglang"]
