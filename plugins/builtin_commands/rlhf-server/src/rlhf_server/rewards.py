"""A reward model behind HTTP: OpenRLHF's remote reward protocol, and conversations."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_host import RoleHandle, Segment, Task, Trajectory
from rlhf_server.aside import Aside
from rlhf_server.errors import ApiError, invalid
from rlhf_server.http import HttpServer, Route, check_key

if TYPE_CHECKING:
    from aiohttp import web

BODY_BYTES = 64 << 20
WAITING = 16384
"""Number of waiting texts from which on a further request is refused with 429."""
PART = 1 << 20
"""Number of characters of a request that are tokenised before their rewards are computed; then come the next ones."""
PASS = 256
"""Number of texts per pass, the shortest first, so that long ones wait only for long ones."""


class RewardServer:
    """``POST /get_reward`` as OpenRLHF's trainers send it, ``POST /v1/score`` for texts or conversations, ``GET /health``.

    A text is tokenised unchanged, with the special tokens that it spells. A text that is empty or too long for the model has
    the reward ``null``.
    """

    def __init__(self, role: RoleHandle, model: str, key: str | None = None, max_tokens: int | None = None):
        self.role, self.model, self.key = role, model, key
        self.max_tokens = min(max_tokens or role.context_length, role.context_length)
        self._http = HttpServer("the reward server")
        self._aside = Aside()
        self._waiting: list[tuple[Trajectory, asyncio.Future[float]]] = []
        self._held = 0
        """Number of texts of all requests that have no answer yet."""
        self._passes: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> None:
        """Accepts requests. Raises ``UserError`` if the address is not available."""
        await self._http.start(host, port, self._routes())

    @property
    def url(self) -> str:
        return self._http.url

    async def close(self) -> None:
        await self._http.close()
        if self._passes is not None:
            self._passes.cancel()

    def _routes(self) -> Iterator[Route]:
        yield Route("POST", "/get_reward", self._get_reward, self._admit, BODY_BYTES)
        yield Route("POST", "/v1/score", self._score, self._admit, BODY_BYTES)
        yield Route("GET", "/health", self._health)

    def _admit(self, request: web.Request) -> None:
        if self.key is not None:
            check_key(request, self.key)

    async def _get_reward(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        sent = await self._http.body_of(request)
        values = await self.values(_texts(sent.value, "query"))
        return web.json_response({"rewards": values, "scores": [_sigmoid(value) for value in values], "extra_logs": {}})

    async def _score(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        sent = await self._http.body_of(request)
        body = sent.value
        if ("messages" in body) == ("texts" in body):
            raise invalid("body", "either messages, a list of conversations, or texts, a list of texts")
        if "messages" in body:
            texts = await self._aside.run(sent.long, lambda: self._rendered(body["messages"]))
        else:
            texts = _texts(body, "texts")
        values = await self.values(texts)
        return web.json_response({"model": self.model, "rewards": values, "scores": [_sigmoid(value) for value in values]})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        return web.json_response({"status": "ok", "model": self.model, "waiting": len(self._waiting)})

    def _rendered(self, conversations: Any) -> list[str]:
        tokenizer = self.role.tokenizer
        if not tokenizer.chat_template:
            raise invalid("messages", "the model's tokenizer has no chat template: send texts")
        if not isinstance(conversations, list):
            raise invalid("messages", "a list of conversations, each a list of messages")
        texts = []
        for number, conversation in enumerate(conversations):
            if not isinstance(conversation, list) or not conversation or not all(map(_is_message, conversation)):
                raise invalid(f"messages[{number}]", "a list of messages, each with role and content")
            try:
                texts.append(str(tokenizer.apply_chat_template(conversation, tokenize=False)))
            except Exception as error:
                why = " ".join(str(error).split())
                raise invalid(f"messages[{number}]", f"the chat template cannot write it: {why}") from error
        return texts

    async def values(self, texts: Sequence[str]) -> list[float | None]:
        """Returns the reward of each text; None if it has none."""
        if self._held >= WAITING:
            raise ApiError(429, "too many texts are waiting", "overloaded", retry=True)
        self._held += len(texts)  # before anything is awaited: others ask meanwhile
        try:
            parts = [await self._values(part) for part in _parts(texts)]
        finally:
            self._held -= len(texts)
        values = [value for part in parts for value in part]
        return [value if value is not None and math.isfinite(value) else None for value in values]

    async def _values(self, texts: Sequence[str]) -> list[float | None]:
        # A tokenizer's work of seconds would keep others waiting.
        rows = await asyncio.to_thread(self._rows, texts)
        loop = asyncio.get_running_loop()
        answers = [loop.create_future() if row is not None else None for row in rows]
        self._waiting += [(row, answer) for row, answer in zip(rows, answers, strict=True) if row and answer]
        if self._passes is None or self._passes.done():
            self._passes = asyncio.create_task(self._run_passes())
        try:
            return [None if answer is None else await answer for answer in answers]
        except BaseException:
            for answer in answers:
                if answer is not None:
                    answer.cancel()
            raise

    def _rows(self, texts: Sequence[str]) -> list[Trajectory | None]:
        tokenizer = self.role.tokenizer
        read = [place for place, text in enumerate(texts) if text and self._aside.fits(text, tokenizer, self.max_tokens)]
        encoded = tokenizer([texts[place] for place in read], add_special_tokens=False)["input_ids"] if read else []
        rows: list[Trajectory | None] = [None] * len(texts)
        for place, ids in zip(read, encoded, strict=True):
            if 1 <= len(ids) <= self.max_tokens:
                rows[place] = self._row(ids)
        return rows

    def _row(self, ids: Sequence[int]) -> Trajectory:
        return Trajectory("text", "text", Task(""), [Segment("prompt", list(ids[:1])), Segment("action", list(ids[1:]))])

    async def _run_passes(self) -> None:
        await asyncio.sleep(0)
        # Who asked may have left: those answers are done.
        while waiting := [pair for pair in self._waiting if not pair[1].done()]:
            waiting.sort(key=lambda pair: len(pair[0].segments[1].token_ids))
            batch, self._waiting = waiting[:PASS], waiting[PASS:]
            try:
                values = await self.role.scores([row for row, _ in batch])
            except Exception as error:
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), value in zip(batch, values, strict=True):
                if not answer.done():
                    answer.set_result(value)


def _parts(texts: Sequence[str]) -> Iterator[list[str]]:
    part: list[str] = []
    size = 0
    for text in texts:
        if part and size + len(text) > PART:
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text) + 1
    yield part


def _texts(body: Mapping[str, Any], key: str) -> list[str]:
    texts = body.get(key)
    if isinstance(texts, str):
        texts = [texts]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise invalid(key, "a list of texts")
    return texts


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and "content" in value


def _sigmoid(value: float | None) -> float | None:
    return None if value is None else 0.5 * (1.0 + math.tanh(value / 2))
