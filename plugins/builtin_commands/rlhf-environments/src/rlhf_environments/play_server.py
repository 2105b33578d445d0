"""Episodes over HTTP, for the packages that ``rlhf env export`` writes: they run elsewhere, and an episode is played here.

``POST /start`` (``task``, ``seed``, ``sample``), ``/replay`` (``episode``, ``messages``), ``/call`` (``episode``, ``name``,
``arguments``), ``/close``, ``/tasks``. Errors are ``{"error": {"kind", "message", "retry"}}``.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlhf_server import ApiError, Route

from rlhf_environments.opening import prompt_messages
from rlhf_environments.playing import Environment, Result
from rlhf_environments.replaying import Judged, OpenEpisodes
from rlhf_environments.serving import BODY_BYTES, Invalid, Server, failure, turn_told

if TYPE_CHECKING:
    from aiohttp import web

PAGE = 1000
"""Tasks of one answer."""
STATUS = {"invalid": 400, "full": 429, "failed": 422}


class PlayServer(Server):
    """An environment behind HTTP, for who has the key."""

    def __init__(self, environment: Environment):
        super().__init__(environment)
        self.key = secrets.token_urlsafe(24)
        self._open = OpenEpisodes(environment)

    def _routes(self) -> Iterator[Route]:
        asked = {"start": self._start, "replay": self._replay, "call": self._call, "close": self._close, "tasks": self._tasks}
        for name, ask in asked.items():
            yield Route("POST", f"/{name}", self._answers(ask), self._admit, BODY_BYTES)

    def _admit(self, request: web.Request) -> None:
        if not secrets.compare_digest(request.headers.get("Authorization", ""), f"Bearer {self.key}"):
            raise ApiError(401, "a wrong key", "invalid_api_key")

    def _answers(self, ask: Any) -> Any:
        async def answer(request: web.Request) -> web.StreamResponse:
            from aiohttp import web

            body = (await self._http.body_of(request)).value
            try:
                return web.json_response(await ask(body))
            except Exception as error:
                kind, message, retry = failure(error)
                told = {"error": {"kind": kind, "message": message, "retry": retry}}
                return web.json_response(told, status=STATUS[kind])

        return answer

    async def _tasks(self, body: Mapping[str, Any]) -> dict[str, Any]:
        begin = int(body.get("begin", 0))
        page = self.environment.tasks[begin : begin + PAGE]
        rows = [{"messages": [*map(dict, prompt_messages(task))], "source": task.source, "index": task.index} for task in page]
        return {"tasks": rows, "more": begin + PAGE < len(self.environment.tasks)}

    async def _start(self, body: Mapping[str, Any]) -> dict[str, Any]:
        play, first = await self.environment.start(body.get("task"), body.get("seed"), body.get("sample"))
        name = play.episode.episode_id
        self._open.add(name, play, first)
        return {"episode": name, **turn_told(first)}

    async def _replay(self, body: Mapping[str, Any]) -> dict[str, Any]:
        judged = self._of(body)
        turn = await judged.replay(body["messages"], bool(body.get("truncated")))
        if isinstance(turn, Result):
            await self._close(body)
        return turn_told(turn)

    async def _call(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"content": await self._of(body).call(str(body["name"]), body.get("arguments") or {})}

    async def _close(self, body: Mapping[str, Any]) -> dict[str, Any]:
        await self._open.close(str(body.get("episode")))
        return {}

    def _of(self, body: Mapping[str, Any]) -> Judged:
        judged = self._open.get(str(body.get("episode")))
        if judged is None:
            raise Invalid(f"episode {body.get('episode')!r}: it is not open")
        return judged
