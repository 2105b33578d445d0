"""The policy server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from secrets import compare_digest
from typing import TYPE_CHECKING, Any

from rlhf_host import NoRoom, RoleHandle, SampleKey, Segment
from rlhf_host.rollouts import Call, EpisodePolicy
from rlhf_server import asked, chat, completions, likelihoods, messages, responses
from rlhf_server.aside import Aside
from rlhf_server.bodies import Body
from rlhf_server.errors import ApiError, invalid, openai_form
from rlhf_server.http import HttpServer, Route, check_key
from rlhf_server.limits import Limits
from rlhf_server.sessions import Session, new_token

if TYPE_CHECKING:
    from aiohttp import web

IGNORED = 100
"""Maximum number of names of ignored parameters that a server distinguishes; further ones are ``other``."""
KEEPALIVE_S = 10.0
"""Maximum seconds without output to a streaming client."""
LONG_ANSWER = 4096
"""Number of tokens with log-probabilities from which on an answer is written in a thread."""
STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
Answer = Callable[[list[Call], Mapping[str, Any]], Awaitable[dict[str, Any]]]
Chunks = Callable[[Mapping[str, Any], bool], list[dict[str, Any]]]


class PolicyServer:
    """OpenAI's API for the policies of episodes: each has its own base URL.

    ``shared`` returns the policy behind the base URL without an episode, for clients with the server's own key, and ``role`` is
    its model. Requests without access are refused before any of the body is read.
    """

    def __init__(self, limits: Limits, model: str, shared: Callable[[], EpisodePolicy] | None, role: RoleHandle | None = None):
        self.limits, self.model, self.shared, self.role = limits, model, shared, role
        self.api_key = new_token(256)
        self.sessions: dict[str, Session] = {}
        self.shared_url = ""
        self._http = HttpServer("the policy server")
        self._aside = Aside()
        self._all = new_token()
        """Part of the path of ``shared_url`` in place of an episode's token."""
        self._common: Session | None = None
        self._open = 0
        self._ignored: set[str] = set()

    @classmethod
    async def start(
        cls,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        limits: Limits | None = None,
        model: str = "policy",
        shared: Callable[[], EpisodePolicy] | None = None,
        role: RoleHandle | None = None,
    ) -> PolicyServer:
        """Starts the server. Raises ``UserError`` if the address is not available."""
        server = cls(limits or Limits(), model, shared, role)
        await server._http.start(host, port, server._routes(port))
        server.shared_url = f"{server.url}/v1" if port or shared else f"{server.url}/e/{server._all}/v1"
        return server

    @property
    def url(self) -> str:
        return self._http.url

    def _routes(self, port: int) -> Iterator[Route]:
        # Programs that run already know the port alone, and name their episode in the body.
        common = self._admit_key if self.shared is not None else self._admit_anyone if port else self._admit_nobody
        for base, admit in (("/e/{token}/v1", self._admit_episode), ("/v1", common)):
            yield Route("POST", f"{base}/chat/completions", self._chat, admit, self.limits.body_bytes)
            yield Route("POST", f"{base}/completions", self._completions, admit, self.limits.body_bytes)
            yield Route("POST", f"{base}/responses", self._responses, admit, self.limits.body_bytes)
            form = messages.error_of
            yield Route("POST", f"{base}/messages", self._messages, admit, self.limits.body_bytes, form)
            yield Route("POST", f"{base}/messages/count_tokens", self._count_tokens, admit, self.limits.body_bytes, form)
            yield Route("POST", f"{base}/tokenize", self._tokenize, admit, self.limits.body_bytes)
            yield Route("GET", f"{base}/models", self._models, admit)
            yield Route("GET", f"{base}/models/{{model:.+}}", self._models, admit)
        for what in ("reward", "done", "fail"):
            yield Route("POST", f"/e/{{token}}/{what}", self._report, self._admit_episode, self.limits.report_bytes)
        yield Route("GET", "/health", self._health)

    def _admit_key(self, request: web.Request) -> None:
        check_key(request, self.api_key)

    def _admit_episode(self, request: web.Request) -> None:
        token = request.match_info["token"]
        if not compare_digest(token.encode(errors="surrogateescape"), self._all.encode()):
            self._opened(token)

    def _admit_anyone(self, request: web.Request) -> None:
        if not self.sessions:
            raise ApiError(410, "no episode is open", "episode_over")

    def _admit_nobody(self, request: web.Request) -> None:
        raise ApiError(404, "the request names no episode: use an episode's base URL", "no_policy")

    def open(self, policy: EpisodePolicy) -> Session:
        """Returns a base URL for one attempt at an episode."""
        token = new_token()
        url = f"{self.url}/e/{token}/v1"
        session = self.sessions[token] = Session(policy, url, token, self.limits, shared_url=self.shared_url)
        return session

    def close_session(self, session: Session) -> None:
        session.close()
        self.sessions.pop(session.token, None)

    async def close(self) -> None:
        for session in list(self.sessions.values()):
            self.close_session(session)
        await self._http.close()

    # --- requests ---------------------------------------------------------------------------------

    def _opened(self, token: str) -> Session:
        session = self.sessions.get(token)
        if session is None or session.closed:
            raise ApiError(410, "this episode is over, or there never was one", "episode_over")
        return session

    def _session(self, request: web.Request, body: Mapping[str, Any]) -> Session:
        """Returns the session of an admitted request."""
        token = request.match_info.get("token")
        if token is not None and token != self._all:
            return self._opened(token)
        metadata = body.get("metadata")
        named = metadata.get("rlhf_episode") if isinstance(metadata, Mapping) else None
        if named is not None:
            return self._opened(str(named))
        if self.shared is None:
            why = "the request names no episode: use an episode's base URL, or metadata.rlhf_episode"
            raise ApiError(404, why, "no_policy")
        # An episode has one policy, whatever its program calls it.
        if body.get("model") not in (None, self.model):
            raise ApiError(
                404, f"there is no model {body['model']!r} here: its name is {self.model!r}", "model_not_found", "model"
            )
        if self._common is None or self._common.calls + self.limits.prompts > self.limits.in_flight:
            limits = Limits(calls=self.limits.in_flight, calls_at_once=self.limits.in_flight)
            # A new one now and then, because a tree keeps what was said.
            self._common = Session(self.shared(), f"{self.url}/v1", self.api_key, limits, free=True, role=self.role)
        return self._common

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        sent = await self._http.body_of(request)
        body, session = sent.value, self._session(request, sent.value)
        messages, tools = chat.messages_of(body, self.limits), chat.tools_of(body, self.limits)
        sampling = asked.sampling_of(body, session.policy.sampling, self.limits, free=session.free)
        wanted = likelihoods.wanted_of(body, "chat", computed=session.role is not None)
        policy, tokenizer = session.policy, session.policy.tokenizer
        seed = asked.seed_of(body, free=session.free)

        async def work(number: int) -> Call:
            plan = await self._aside.plan(policy, messages, tools, long=sent.long)
            return await policy.answer(plan, sampling, tools, parsed=True, key=_key(seed, number))

        async def answer(calls: list[Call], body: Mapping[str, Any]) -> dict[str, Any]:
            scored = None
            if wanted.passes:
                scored = await self._scored(session, [(call.prompt_ids, call) for call in calls], wanted)
            return chat.answer_of(calls, body, self.model, tokenizer, scored)

        return await self._respond(request, session, sent, work, answer, chat.chunks_of, chat.KNOWN)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        sent = await self._http.body_of(request)
        body, session = sent.value, self._session(request, sent.value)
        policy, wanted = session.policy, likelihoods.wanted_of(body, "text", computed=session.role is not None)
        prompts = await self._prompts(session, sent)
        read_only = wanted.echo and type(body.get("max_tokens")) is int and body["max_tokens"] == 0
        plain = {name: value for name, value in body.items() if not (read_only and name == "max_tokens")}
        sampling = asked.sampling_of(plain, policy.sampling, self.limits, free=session.free)
        seed, n = asked.seed_of(body, free=session.free), asked.integer(body, "n", 1, self.limits.choices) or 1
        each = [prompt for prompt in prompts for _ in range(n)]
        if len(each) > self.limits.prompts:
            raise invalid("n", f"{len(prompts)} prompts with {n} choices each; at most {self.limits.prompts} together")

        async def work(number: int) -> Call:
            return await policy.answer(policy.tree.plan_ids(each[number].ids), sampling, key=_key(seed, number % n))

        async def answer(calls: list[Call], body: Mapping[str, Any]) -> dict[str, Any]:
            scored = None
            if wanted.passes:
                rows = zip(each, calls or [None] * len(each), strict=True)
                scored = await self._scored(session, [(prompt.ids, call) for prompt, call in rows], wanted)
            long = wanted.logprobs and sum(len(prompt.ids) for prompt in each) > LONG_ANSWER

            def write() -> dict[str, Any]:
                args = (body, wanted, self.model, policy.tokenizer, sampling.stop, scored)
                return completions.answer_of(each, calls, *args)

            return await self._aside.run(long, write)

        count = 0 if read_only else len(each)
        return await self._respond(request, session, sent, work, answer, completions.chunks_of, completions.KNOWN, count=count)

    async def _scored(
        self, session: Session, rows: Sequence[tuple[Sequence[int], Call | None]], wanted: likelihoods.Wanted
    ) -> list[likelihoods.Scored]:
        """Returns the log-probabilities of answers, or of prompts with their answers if those are echoed."""
        assert session.role is not None
        most, read = session.policy.max_tokens, []
        for prompt, call in rows:
            said = [] if call is None or call.generation is None else list(call.generation.token_ids)
            begins = 1 if wanted.echo else len(prompt)
            images = () if call is None else call.prompt_images
            read.append((Segment("prompt", prompt[:begins], images=images), [*prompt[begins:], *said]))
        with session.told():
            if (longest := max(len(prompt.token_ids) + len(ids) for prompt, ids in read)) > most:
                raise NoRoom(f"the prompt has {longest} tokens; max_tokens is {most}")
            scored = await likelihoods.score(session.role, read, wanted.top)
        first = [None] if wanted.echo else []  # nothing predicts a row's first token
        return [likelihoods.Scored([*first, *one.logprobs], [*first, *one.top]) for one in scored]

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        sent = await self._http.body_of(request)
        body, session = sent.value, self._session(request, sent.value)
        before = responses.previous_of(body, session.responses)
        messages, tools = responses.messages_of(body, before, self.limits), responses.tools_of(body, self.limits)
        sampling = asked.sampling_of(body, session.policy.sampling, self.limits, free=session.free)
        wanted = responses.wanted_of(body, computed=session.role is not None)
        seed = asked.seed_of(body, free=session.free)
        if body.get("n") not in (None, 1):
            raise invalid("n", "a response is one")

        async def work(number: int) -> Call:
            plan = await self._aside.plan(session.policy, messages, tools, long=sent.long)
            return await session.policy.answer(plan, sampling, tools, parsed=True, key=_key(seed, number))

        async def answer(calls: list[Call], body: Mapping[str, Any]) -> dict[str, Any]:
            scored = None
            if wanted.passes:
                scored = await self._scored(session, [(call.prompt_ids, call) for call in calls], wanted)
            whole = responses.answer_of(calls, body, self.model, session.policy.tokenizer, wanted, scored)
            assert calls[0].shown is not None
            said = messages[1:] if body.get("instructions") else messages
            session.remember(whole["id"], [*said, calls[0].shown.message])
            return whole

        told = replace(sent, value=responses.with_unread(body))
        return await self._respond(request, session, told, work, answer, responses.chunks_of, responses.KNOWN)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        sent = await self._http.body_of(request)
        session = self._session(request, sent.value)
        body = messages.plain_of(sent.value)
        asked_for, tools = messages.messages_of(body, self.limits), messages.tools_of(body, self.limits)
        if asked.integer(body, "max_tokens", 1) is None:
            raise invalid("max_tokens", "missing: the longest answer, in tokens")
        likelihoods.wanted_of(body, "other", computed=False)
        policy = session.policy
        stop_name = "stop_sequences"
        sampling = asked.sampling_of(body, policy.sampling, self.limits, free=session.free, stop_name=stop_name)

        async def work(number: int) -> Call:
            plan = await self._aside.plan(policy, asked_for, tools, long=sent.long)
            return await policy.answer(plan, sampling, tools, parsed=True)

        async def answer(calls: list[Call], body: Mapping[str, Any]) -> dict[str, Any]:
            return messages.answer_of(calls, sampling.stop, self.model, policy.tokenizer)

        plain = replace(sent, value={**body, "n": 1})
        form = messages.error_of
        return await self._respond(request, session, plain, work, answer, messages.chunks_of, messages.KNOWN, form)

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        sent = await self._http.body_of(request)
        session = self._session(request, sent.value)
        body = messages.plain_of(sent.value)
        asked_for, tools = messages.messages_of(body, self.limits), messages.tools_of(body, self.limits)
        with session.told():
            tokens = await self._aside.render(session.policy, asked_for, tools, long=sent.long)
        return web.json_response({"input_tokens": len(tokens)})

    async def _respond(
        self,
        request: web.Request,
        session: Session,
        sent: Body,
        work: Callable[[int], Awaitable[Call]],
        answer: Answer,
        chunks: Chunks,
        known: tuple[str, ...],
        errors: Callable[[ApiError], dict[str, Any]] = openai_form,
        *,
        count: int | None = None,
    ) -> web.StreamResponse:
        """Answers with ``count`` calls; if it is None, with as many as the request has choices."""
        from aiohttp import web

        body = sent.value
        count = asked.integer(body, "n", 1, self.limits.choices) or 1 if count is None else count
        usage = asked.wants_usage(body)
        ignored = asked.ignored_in(body, session.policy.sampling, known, free=session.free)
        new = [name for name in ignored if name not in self._ignored]
        self._ignored.update(new[: IGNORED - len(self._ignored)])
        session.ignored.update(name if name in self._ignored else "other" for name in ignored)
        if self._open >= self.limits.in_flight:
            raise ApiError(429, "too many requests at once", "overloaded", retry=True)
        digest = request.path.encode() + sent.digest
        again = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        self._open += 1
        calls: list[Call] = []

        async def ask() -> dict[str, Any]:
            calls.extend(await session.ask(digest, again, count, work))
            return await answer(calls, body)

        asking = asyncio.ensure_future(ask())
        try:
            response: web.StreamResponse | None = None
            if body.get("stream"):
                response = await self._kept_alive(request, asking)
            whole = await asking
            headers = _headers(calls, ignored)
            if not body.get("stream"):
                response = web.json_response(whole, headers=headers)
                await response.prepare(request)
            else:
                if response is None:
                    response = await _begin_stream(request, headers)
                for chunk in chunks(whole, usage):
                    await response.write(_event(chunk))
                if chunks not in (responses.chunks_of, messages.chunks_of):
                    await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
            session.arrived.update(calls)
            return response
        except ApiError as error:
            if response is None:
                raise
            await response.write(_event(errors(error)))  # the stream has begun
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

    async def _kept_alive(self, request: web.Request, asking: asyncio.Future[dict[str, Any]]) -> web.StreamResponse | None:
        """Waits for the answer. If that takes long, a stream gets signs of life meanwhile, and then the whole message in one
        event. An error before the first byte is an ordinary one.
        """
        response = None
        while not (await asyncio.wait([asking], timeout=KEEPALIVE_S))[0]:
            if response is None:
                response = await _begin_stream(request, {})
            await response.write(b": keepalive\n\n")
        return response

    async def _prompts(self, session: Session, sent: Body) -> list[completions.Prompt]:
        """Returns the tokens of texts, or those that were sent."""
        policy, given = session.policy, sent.value.get("prompt")

        def work() -> list[completions.Prompt]:
            for text in given if isinstance(given, list) else [given]:
                self._aside.refuse_unfit(policy, [text] if isinstance(text, str) else [])
            return completions.prompts_of(sent.value, policy.tokenizer, policy.vocabulary, self.limits)

        with session.told():
            return await self._aside.run(sent.long, work)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        name = request.match_info.get("model")
        self._session(request, {"model": name})
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "rlhf-host"}
        return web.json_response({"object": "list", "data": [model]} if name is None else model)

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        sent = await self._http.body_of(request)
        body, session = sent.value, self._session(request, sent.value)
        policy = session.policy
        if "messages" in body:
            messages, tools = chat.messages_of(body, self.limits), chat.tools_of(body, self.limits)
            with session.told():
                tokens = await self._aside.render(policy, messages, tools, long=sent.long)
        else:
            tokens, *more = [prompt.ids for prompt in await self._prompts(session, sent)]
            if more:
                raise invalid("prompt", "one prompt a request")
        return web.json_response({"count": len(tokens), "max_model_len": policy.max_tokens, "tokens": tokens})

    async def _report(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        body = (await self._http.body_of(request)).value if request.can_read_body else {}
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


def _key(seed: int | None, number: int) -> SampleKey | None:
    """Returns the key of a choice of a request with a seed; None: the policy makes one."""
    return None if seed is None else (seed, 0, number, 0)


def _headers(calls: Iterable[Call], ignored: Sequence[str]) -> dict[str, str]:
    """Returns the headers of an answer: parameters that were ignored, and the version of the weights."""
    headers = {"x-rlhf-ignored": ",".join(dict.fromkeys(ignored))} if ignored else {}
    versions = [version for call in calls if call.generation for version in call.generation.versions]
    return headers | {"x-rlhf-version": str(max(versions, default=-1))}


async def _begin_stream(request: web.Request, headers: Mapping[str, str]) -> web.StreamResponse:
    from aiohttp import web

    response = web.StreamResponse(headers={**STREAM, **headers})
    await response.prepare(request)
    return response


def _event(value: Mapping[str, Any]) -> bytes:
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value)}\n\n".encode()
