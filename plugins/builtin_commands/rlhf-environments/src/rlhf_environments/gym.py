"""An environment as a resources server of NeMo Gym: ``/seed_session``, an endpoint for each tool, ``/verify``, and ``/rows``.

A session is a cookie. Tools are run one by one in a trial; ``/verify`` replays the whole response and gives the reward. What fails
is an error with the status 422, and no reward.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlhf_server import ApiError, Route

from rlhf_environments.playing import Environment, Result
from rlhf_environments.replaying import Judged, OpenEpisodes
from rlhf_environments.responses import SAMPLE, SEED, TASK, failure_of, messages_of_output, row_of, same_input, truncated
from rlhf_environments.serving import BODY_BYTES, Invalid, Server, failure, of_this_machine, turn_told
from rlhf_host import EpisodeFailed

if TYPE_CHECKING:
    from aiohttp import web

COOKIE = "rlhf_session"
GOES_ON = (
    "the environment goes on after this answer, and a resources server judges one answer: play it with the agent that"
    " rlhf env export --as nemo-gym --output writes beside it"
)


class GymServer(Server):
    """An environment behind the protocol of NeMo Gym's resources servers."""

    def __init__(self, environment: Environment):
        super().__init__(environment)
        self._open = OpenEpisodes(environment)

    def _routes(self) -> Iterator[Route]:
        yield Route("POST", "/seed_session", self._failing(self._seed), of_this_machine, BODY_BYTES)
        yield Route("POST", "/verify", self._failing(self._verify), of_this_machine, BODY_BYTES)
        yield Route("GET", "/rows", self._failing(self._rows), of_this_machine)
        yield Route("POST", "/{tool}", self._failing(self._tool), of_this_machine, BODY_BYTES)

    def _failing(self, handler: Any) -> Any:
        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                response: web.StreamResponse = await handler(request)
                return response
            except ApiError:
                raise
            except Exception as error:
                kind, message, retry = failure(error)
                status = {"invalid": 400, "full": 429}.get(kind, 503 if retry else 422)
                raise ApiError(status, message, kind, retry=retry) from error

        return answer

    async def _seed(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        row = (await self._http.body_of(request)).value
        if TASK not in row:
            raise Invalid(f"{TASK}: the row has none: rows of this environment are at /rows")
        await self._open.close(request.cookies.get(COOKIE, ""))
        play, first = await self.environment.start(row[TASK], row.get(SEED), row.get(SAMPLE))
        if not same_input((row.get("responses_create_params") or {}).get("input"), turn_told(first)):
            await play.close()
            raise Invalid("responses_create_params.input: another prompt than the episode's: take rows from /rows")
        name = secrets.token_urlsafe(16)
        self._open.add(name, play, first)
        answer = web.json_response({})
        answer.set_cookie(COOKIE, name, httponly=True)
        return answer

    async def _tool(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        name, judged = request.match_info["tool"], self._judged(request)
        known = [tool.get("function", tool)["name"] for tool in judged.turn.tools]
        if name not in known:
            raise ApiError(404, f"there is no tool {name!r}; there are {', '.join(known) or 'none'}", "not_found")
        arguments = (await self._http.body_of(request)).value
        return web.Response(text=await judged.call(name, arguments))

    async def _verify(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        body, judged = (await self._http.body_of(request)).value, self._judged(request)
        response = body.get("response")
        if not isinstance(response, Mapping) or not isinstance(response.get("output"), list):
            raise Invalid("response: its output is missing")
        try:
            if why := failure_of(response):
                raise EpisodeFailed(why)
            end = await judged.replay(messages_of_output(response["output"]), truncated(response))
        finally:
            await self._open.close(request.cookies[COOKIE])
        if not isinstance(end, Result):
            raise EpisodeFailed(GOES_ON)
        parts = {f"{name}_reward": value for name, value in end.rewards.items()}
        told = {**end.metrics, **parts, **({} if end.score is None else {"score": end.score}), "reward": end.reward}
        kept = {name: body.get(name) for name in ("responses_create_params", "response")}
        return web.json_response({**kept, **told})

    async def _rows(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        lines = [json.dumps(row, ensure_ascii=False) async for row in rows(self.environment)]
        return web.Response(text="".join(f"{line}\n" for line in lines), content_type="application/x-ndjson")

    def _judged(self, request: web.Request) -> Judged:
        judged = self._open.get(request.cookies.get(COOKIE, ""))
        if judged is None:
            raise ApiError(400, "no session is open: /seed_session opens one, and sends its cookie", "no_session")
        return judged


async def rows(environment: Environment) -> Any:
    """Yields the rows of all tasks, each with what its episode shows first."""
    for task in range(len(environment.tasks)):
        play, first = await environment.start(task, sample=0)
        await play.close()
        yield row_of(task, turn_told(first))
