"""The policy server."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_host.rollouts.conversation import Call
from rlhf_host.rollouts.policy import EpisodePolicy
from rlhf_host.serving import asked, chat, completions, responses
from rlhf_host.serving.errors import ApiError, invalid
from rlhf_host.serving.http import HttpServer, Route, body_of, check_key
from rlhf_host.serving.limits import Limits
from rlhf_host.serving.sessions import Session, new_token

if TYPE_CHECKING:
    from aiohttp import web

KEEPALIVE_S = 10.0
"""A streaming client hears something at least so often."""
STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
Answer = Callable[[list[Call], Mapping[str, Any]], dict[str, Any]]
Chunks = Callable[[Mapping[str, Any], bool], list[dict[str, Any]]]


class PolicyServer:
    """OpenAI's API for the policies of episodes: each has a base URL of its own.

    ``shared`` gives the policy behind the base URL without an episode, for clients with the server's own key.
    """

    def __init__(self, limits: Limits, model: str, shared: Callable[[], EpisodePolicy] | None):
        self.limits, self.model, self.shared = limits, model, shared
        self.api_key = new_token(256)
        self.sessions: dict[str, Session] = {}
        self._http = HttpServer("the policy server", limits.body_bytes)
        self._common: Session | None = None
        self._open = 0
        self._numbers = itertools.count()

    @classmethod
    async def start(
        cls,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        limits: Limits | None = None,
        model: str = "policy",
        shared: Callable[[], EpisodePolicy] | None = None,
    ) -> PolicyServer:
        """A server that accepts requests. Raises ``UserError`` without aiohttp, or where the address cannot be had."""
        server = cls(limits or Limits(), model, shared)
        await server._http.start(host, port, server._routes())
        return server

    @property
    def url(self) -> str:
        return self._http.url

    def _routes(self) -> Iterator[Route]:
        for base in ("/e/{token}/v1", "/v1"):
            yield "POST", f"{base}/chat/completions", self._chat
            yield "POST", f"{base}/completions", self._completions
            yield "POST", f"{base}/responses", self._responses
            yield "GET", f"{base}/models", self._models
            yield "POST", f"{base}/tokenize", self._tokenize
        for what in ("reward", "done", "fail"):
            yield "POST", f"/e/{{token}}/{what}", self._report
        yield "GET", "/health", self._health

    def open(self, policy: EpisodePolicy) -> Session:
        """A base URL for one attempt at an episode."""
        token = new_token()
        session = self.sessions[token] = Session(
            policy, f"{self.url}/e/{token}/v1", token, self.limits, shared_url=f"{self.url}/v1"
        )
        return session

    def close_session(self, session: Session) -> None:
        session.close()
        self.sessions.pop(session.token, None)

    async def close(self) -> None:
        for session in list(self.sessions.values()):
            self.close_session(session)
        await self._http.close()

    # --- requests ---------------------------------------------------------------------------------

    def _session(self, request: web.Request, body: Mapping[str, Any]) -> Session:
        metadata = body.get("metadata")
        token = request.match_info.get("token") or (metadata.get("rlhf_episode") if isinstance(metadata, Mapping) else None)
        if token is not None:
            session = self.sessions.get(str(token))
            if session is None or session.closed:
                raise ApiError(410, "this episode is over, or there never was one", "episode_over")
            return session
        if self.shared is None:
            why = "the request names no episode: use an episode's base URL, or metadata.rlhf_episode"
            raise ApiError(404, why, "no_policy")
        check_key(request, self.api_key)
        if self._common is None or self._common.calls + self.limits.choices > self.limits.in_flight:
            limits = Limits(calls=self.limits.in_flight, calls_at_once=self.limits.in_flight)
            # A new one now and then, because a tree keeps what was said.
            # Numbers go on, so that nobody goes on from another's answer.
            policy = replace(self.shared(), _numbers=self._numbers)
            self._common = Session(policy, f"{self.url}/v1", self.api_key, limits, free=True)
        return self._common

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request)
        session = self._session(request, body)
        messages, tools = chat.messages_of(body, self.limits), chat.tools_of(body, self.limits)
        sampling = asked.sampling_of(body, session.policy.sampling, self.limits, free=session.free)
        tokenizer = session.policy.tokenizer

        async def work() -> Call:
            return await session.policy.complete(messages, tools, sampling)

        def answer(calls: list[Call], body: Mapping[str, Any]) -> dict[str, Any]:
            return chat.answer_of(calls, body, self.model, tokenizer)

        return await self._respond(request, session, body, work, answer, chat.chunks_of, chat.KNOWN)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request)
        session = self._session(request, body)
        policy = session.policy
        prompt = completions.prompt_of(body, policy.tokenizer)
        sampling = asked.sampling_of(body, policy.sampling, self.limits, free=session.free)

        async def work() -> Call:
            return await policy.answer(policy.tree.plan_ids(prompt), sampling)

        def answer(calls: list[Call], body: Mapping[str, Any]) -> dict[str, Any]:
            return completions.answer_of(calls, body, self.model, policy.tokenizer)

        return await self._respond(request, session, body, work, answer, completions.chunks_of, completions.KNOWN)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request)
        session = self._session(request, body)
        before = responses.previous_of(body, session.responses)
        messages, tools = responses.messages_of(body, before, self.limits), responses.tools_of(body, self.limits)
        sampling = asked.sampling_of(body, session.policy.sampling, self.limits, free=session.free)
        if body.get("n") not in (None, 1):
            raise invalid("n", "a response is one")

        async def work() -> Call:
            return await session.policy.complete(messages, tools, sampling)

        def answer(calls: list[Call], body: Mapping[str, Any]) -> dict[str, Any]:
            whole = responses.answer_of(calls, body, self.model, session.policy.tokenizer)
            assert calls[0].reply is not None
            said = messages[1:] if body.get("instructions") else messages
            session.remember(whole["id"], [*said, calls[0].reply.message])
            return whole

        return await self._respond(request, session, body, work, answer, responses.chunks_of, responses.KNOWN)

    async def _respond(
        self,
        request: web.Request,
        session: Session,
        body: Mapping[str, Any],
        work: Callable[[], Awaitable[Call]],
        answer: Answer,
        chunks: Chunks,
        known: tuple[str, ...],
    ) -> web.StreamResponse:
        from aiohttp import web

        count = asked.integer(body, "n", 1, self.limits.choices) or 1
        usage = asked.wants_usage(body)
        ignored = asked.ignored_in(body, session.policy.sampling, known, free=session.free)
        session.ignored.update(ignored)
        if self._open >= self.limits.in_flight:
            raise ApiError(429, "too many requests at once", "overloaded", retry=True)
        try:
            digest = hashlib.blake2b(request.path.encode() + json.dumps(body, sort_keys=True).encode(), digest_size=16).digest()
        except RecursionError as error:
            raise invalid("body", "it is nested too deeply") from error
        again = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        self._open += 1
        asking = asyncio.ensure_future(session.ask(digest, again, count, work))
        calls: list[Call] = []
        try:
            response: web.StreamResponse | None = None
            if body.get("stream"):
                response = await self._kept_alive(request, asking)
            calls = await asking
            headers = {"x-rlhf-ignored": ",".join(dict.fromkeys(ignored))} if ignored else {}
            versions = [version for call in calls if call.generation for version in call.generation.versions]
            headers["x-rlhf-version"] = str(max(versions, default=-1))
            whole = answer(calls, body)
            if not body.get("stream"):
                response = web.json_response(whole, headers=headers)
                await response.prepare(request)
            else:
                if response is None:
                    response = web.StreamResponse(headers=STREAM | headers)
                    await response.prepare(request)
                for chunk in chunks(whole, usage):
                    await response.write(_event(chunk))
                if chunks is not responses.chunks_of:
                    await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
            session.arrived.update(calls)
            return response
        except ApiError as error:
            if response is None:
                raise
            await response.write(_event(error.body))  # the stream has begun
            await response.write_eof()
            return response
        except BaseException:
            # It did not arrive: it trains nothing, unless its client goes on from it, or has another answer of it.
            for call in set(calls) - session.arrived:
                session.policy.tree.drop(call, "undelivered")
            raise
        finally:
            self._open -= 1
            asking.cancel()

    async def _kept_alive(self, request: web.Request, asking: asyncio.Future[list[Call]]) -> web.StreamResponse | None:
        """Wait for the answer; a stream that hears something meanwhile, where that takes long. The whole message comes in one event
        then: an error before the first byte is an ordinary one."""
        from aiohttp import web

        response = None
        while not (await asyncio.wait([asking], timeout=KEEPALIVE_S))[0]:
            if response is None:
                response = web.StreamResponse(headers=STREAM)
                await response.prepare(request)
            await response.write(b": keepalive\n\n")
        return response

    async def _models(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        self._session(request, {})
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "rlhf-host"}
        return web.json_response({"object": "list", "data": [model]})

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        body = await body_of(request)
        policy = self._session(request, body).policy
        if "messages" in body:
            tokens = policy.codec.render(chat.messages_of(body, self.limits), chat.tools_of(body, self.limits))
        else:
            tokens = completions.prompt_of(body, policy.tokenizer)
        return web.json_response({"count": len(tokens), "max_model_len": policy.max_tokens, "tokens": tokens})

    async def _report(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        body = await body_of(request) if request.can_read_body else {}
        session = self._session(request, {})
        match request.path.rpartition("/")[2]:
            case "reward":
                session.report(body)
            case "fail":
                session.fail(body)
            case _:
                session.done.set()
        return web.json_response({"ok": True})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        return web.json_response({"status": "ok", "episodes": len(self.sessions)})


def _event(value: Mapping[str, Any]) -> bytes:
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value)}\n\n".encode()
