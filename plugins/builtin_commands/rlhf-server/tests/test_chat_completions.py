"""Chat completions with the real client: what it gets, and what the tree keeps."""

from __future__ import annotations

import asyncio
import itertools
import json

import httpx
import openai
import pytest
from rlhf_server.limits import Limits

from rlhf_host.errors import LostError

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]
USER = [{"role": "user", "content": "hi"}]


def client(session, **settings):
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, **settings)


def rows(session):
    return session.policy.trajectories()


def test_a_conversation_of_two_turns_is_one_row(serve, stage):
    words = itertools.count(1)

    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as openai_client:
            first = await openai_client.chat.completions.create(model="policy", messages=USER)
            said = first.choices[0].message
            messages = [*USER, {"role": "assistant", "content": said.content}, {"role": "user", "content": "and?"}]
            second = await openai_client.chat.completions.create(model="policy", messages=messages)
        return session, first, second

    session, first, second = serve(test, stage(lambda ids: f"answer {next(words)}"))
    assert [one.choices[0].message.content for one in (first, second)] == ["answer 1", "answer 2"]
    assert first.choices[0].finish_reason == "stop"
    assert first.usage.completion_tokens == len("answer 1") + 1
    [row] = rows(session)
    assert [segment.kind for segment in row.segments] == ["prompt", "action", "observation", "action"]
    message = second.choices[0].message
    assert message.prompt_token_ids + message.generation_token_ids == [t for s in row.segments for t in s.token_ids]
    assert message.generation_log_probs == [-0.5] * len("answer 2.")


def test_tools_by_the_synchronous_client(serve, stage):
    async def test(server, stage):
        session = server.open(stage.policy())

        def program():
            with openai.OpenAI(base_url=session.base_url, api_key="x") as sync:
                first = sync.chat.completions.create(model="m", messages=USER, tools=TOOLS)
                said = first.choices[0].message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
                result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3"}
                return first, sync.chat.completions.create(model="m", messages=[*USER, said, result], tools=TOOLS)

        return session, *await asyncio.to_thread(program)

    said = iter([CALL, "it is 3"])
    session, first, second = serve(test, stage(lambda ids: next(said)))
    [call] = first.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    assert (len(call.id), first.choices[0].finish_reason) == (9, "tool_calls")
    assert second.choices[0].message.content == "it is 3"
    [row] = rows(session)
    assert len(row.actions) == 2


def test_a_stream_has_the_same_message(serve, stage):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            return [
                chunk async for chunk in await one.chat.completions.create(model="m", messages=USER, tools=TOOLS, **options)
            ]

    chunks = serve(test, stage(lambda ids: "so " + CALL))
    assert chunks[0].choices[0].delta.content == "so"
    assert chunks[0].choices[0].delta.tool_calls[0].function.name == "add"
    assert chunks[1].choices[0].finish_reason == "tool_calls"
    assert chunks[2].usage.completion_tokens > 0


def test_several_choices_are_siblings(serve, stage):
    words = itertools.count()

    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one:
            return session, await one.chat.completions.create(model="m", messages=USER, n=3)

    session, answer = serve(test, stage(lambda ids: str(next(words))))
    assert sorted(choice.message.content for choice in answer.choices) == ["0", "1", "2"]
    assert [row.final for row in rows(session)] == [False, False, True]


def test_the_run_s_sampling_is_imposed_and_said(serve, stage):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one:
            raw = await one.chat.completions.with_raw_response.create(
                model="m", messages=USER, temperature=0.0, seed=3, top_p=1.0, max_tokens=4, stop=["x"], user="me"
            )
        return session, raw, stage

    session, raw, stage = serve(test, stage(lambda ids: "long answer"))
    assert set(raw.headers["x-rlhf-ignored"].split(",")) == {"temperature", "seed", "user"}
    assert set(session.ignored) == {"temperature", "seed", "user"}
    [(_, sampling, _)] = stage.engine.calls
    assert (sampling.temperature, sampling.max_new_tokens, sampling.stop) == (1.0, 4, ("x",))
    assert raw.headers["x-rlhf-version"] == "0"
    assert raw.parse().choices[0].finish_reason == "length"


def test_a_retry_gets_the_same_answer_and_a_new_request_another(serve, stage):
    words = itertools.count()

    async def test(server, stage):
        session = server.open(stage.policy())
        async with httpx.AsyncClient(base_url=session.base_url) as http:

            async def ask(retry):
                headers = {"x-stainless-retry-count": retry}
                answer = await http.post("/chat/completions", json={"messages": USER}, headers=headers)
                return answer.json()["choices"][0]["message"]["content"]

            said = [await ask("0"), await ask("1"), await ask("0"), await ask("1")]
            both = await asyncio.gather(ask("0"), ask("1"))
        return session, said, both

    session, said, both = serve(test, stage(lambda ids: str(next(words)), delay_s=0.02))
    assert said == ["0", "0", "1", "1"]
    assert both == ["2", "2"], "it joins what is open"
    assert len(rows(session)) == 3


def test_a_client_that_leaves_cancels_its_request(serve, stage):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one, asyncio.timeout(30):
            asks = asyncio.create_task(one.chat.completions.create(model="m", messages=USER))
            while not stage.waiting:
                await asyncio.sleep(0.01)
            asks.cancel()
            while not stage.cancelled:
                await asyncio.sleep(0.01)
        return session, stage

    session, stage = serve(test, stage(lambda ids: "late", delay_s=60))
    assert stage.cancelled == 1
    assert rows(session) == []
    assert session.policy.tree.calls[0].status == "cancelled"


def test_an_episode_that_is_over_is_gone_and_its_open_calls_are_cancelled(serve, stage):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one:
            asking = asyncio.ensure_future(one.chat.completions.create(model="m", messages=USER))
            while not stage.waiting:
                await asyncio.sleep(0.01)
            server.close_session(session)
            with pytest.raises(openai.APIStatusError) as first:
                await asking
            with pytest.raises(openai.APIStatusError) as second:
                await one.chat.completions.create(model="m", messages=USER)
        return first.value, second.value

    for error in serve(test, stage(lambda ids: "late", delay_s=5)):
        assert (error.status_code, error.body["code"]) == (410, "episode_over")


def test_no_room_is_the_context_length_and_marks_the_episode(serve, stage):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one:
            with pytest.raises(openai.BadRequestError, match="maximum context length is 30 tokens") as error:
                await one.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 40}])
        return session, error.value

    session, error = serve(test, stage(lambda ids: "?", max_tokens=30))
    assert error.code == "context_length_exceeded"
    assert error.response.headers["x-should-retry"] == "false"
    assert session.truncated


def test_an_engine_that_is_gone_is_told_and_kept(serve, stage):
    def gone(ids):
        raise LostError("the engine is gone")

    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one:
            with pytest.raises(openai.InternalServerError, match="the engine is gone") as error:
                await one.chat.completions.create(model="m", messages=USER)
        return session, error.value

    session, error = serve(test, stage(gone))
    assert error.status_code == 503
    assert isinstance(session.lost, LostError)


def test_budgets(serve, stage):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session, max_retries=0) as one:

            async def ask(**more):
                try:
                    await one.chat.completions.create(model="m", messages=USER, **more)
                except openai.APIStatusError as error:
                    return error.status_code, error.body["code"]

            at_once = await asyncio.gather(ask(), ask(), ask())
            return at_once, await ask(n=2), await ask()

    at_once, two, more = serve(test, stage(lambda ids: "x", delay_s=0.05), limits=Limits(calls=3, calls_at_once=2))
    assert sorted(map(str, at_once)) == ["(429, 'overloaded')", "None", "None"]
    assert two == (400, "episode_budget")
    assert more is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ("{", "body"),
        ("[]", "body"),
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages[0].content[0].image_url",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [*USER, {"role": "assistant", "tool_calls": [{}]}, *USER]}, "messages[1].tool_calls[0]"),
        (
            {"messages": [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}, *USER]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            {
                "messages": [
                    *USER,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]},
                    *USER,
                ]
            },
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"messages": [*USER, {"role": "assistant", "content": "I"}]}, "messages"),
        ({"messages": USER, "tools": [], "n": 0}, "n"),
        ({"messages": USER, "tools": [{"type": "web"}]}, "tools[0]"),
        ({"messages": USER, "tools": "add"}, "tools"),
        ({"messages": USER, "n": 9}, "n"),
        ({"messages": USER, "n": True}, "n"),
        ({"messages": USER, "max_tokens": 0}, "max_tokens"),
        ({"messages": USER, "max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"messages": USER, "stop": [""]}, "stop"),
        ({"messages": USER, "stop": ["a"] * 17}, "stop"),
        ({"messages": USER, "stream": True, "stream_options": "usage"}, "stream_options"),
        ("[" * 100_000, "body"),
        ({"messages": USER, "functions": [{}]}, "functions"),
        ({"messages": USER, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": USER, "guided_json": {}}, "guided_json"),
        ({"messages": USER, "audio": {"voice": "x"}}, "audio"),
    ],
)
def test_what_cannot_be_answered_names_what_is_wrong(serve, stage, body, param):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with httpx.AsyncClient(base_url=session.base_url) as http:
            form = {"content": body} if isinstance(body, str) else {"json": body}
            return await http.post("/chat/completions", **form)

    answer = serve(test, stage(lambda ids: "x"))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/e/nobody/v1/chat/completions", {}, 410),
        ("/v1/chat/completions", {}, 404),
        ("/v1/chat/completions", {"Authorization": "Bearer wrong"}, 404),
        ("/v1/nothing", {}, 404),
        ("/v1/chat/completions", {"Host": "evil.example"}, 403),
    ],
)
def test_who_may_ask(serve, stage, path, headers, status):
    async def test(server, stage):
        async with httpx.AsyncClient(base_url=server.url) as http:
            return await http.post(path, json={"messages": USER}, headers=headers)

    answer = serve(test, stage(lambda ids: "x"))
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_a_served_model_goes_by_its_name_and_an_episode_s_policy_by_any(serve, stage):
    made = stage(lambda ids: "hello")

    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one:
            assert (await one.chat.completions.create(model="gpt-5", messages=USER)).model == "org/mine"
            assert (await one.models.retrieve("gpt-5")).id == "org/mine"
        told = []
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=server.api_key) as one:
            assert (await one.models.retrieve("org/mine")).id == "org/mine"
            assert (await one.completions.create(model="org/mine", prompt="x")).choices[0].text == "hello"
            for asking in (
                one.models.retrieve("other"),
                one.chat.completions.create(model="other", messages=USER),
                one.completions.create(model="other", prompt="x"),
                one.responses.create(model="other", input="x"),
            ):
                with pytest.raises(openai.NotFoundError) as error:
                    await asking
                told.append((error.value.code, error.value.param, error.value.body["message"]))
        return told

    told = serve(test, made, model="org/mine", shared=made.policy)
    assert told == [("model_not_found", "model", "there is no model 'other' here: its name is 'org/mine'")] * 4


def test_the_server_s_own_key_reaches_the_shared_policy(serve, stage):
    made = stage(lambda ids: "hello")

    async def test(server, stage):
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=server.api_key) as one:
            models = [model.id async for model in one.models.list()]
            return models, await one.chat.completions.create(model="policy", messages=USER)

    models, answer = serve(test, made, shared=made.policy)
    assert models == ["policy"]
    assert answer.choices[0].message.content == "hello"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", ["1e-39", "5e-324", "0.001", "-1", "1e9", "NaN", "Infinity", "true", '"1"', "[1]", "1" + "0" * 400]),
        ("top_p", ["0", "1e-39", "1.5", "NaN", "true", "{}"]),
        ("top_k", ["-1", "2.0", "99999999999999999999", "true", '"9"']),
        ("min_p", ["-0.1", "1.1", "NaN", "[]"]),
        ("n", ["0", "-1", "1.0", "1e3", "99999999999999999999", "true"]),
        ("max_tokens", ["0", "-1", "1.5", '"many"', "true", "[[]]"]),
        ("stop", ['""', '["a", ""]', "[1]", "7", '{"a": 1}', '"' + "a" * 2000 + '"', str(["a"] * 17).replace("'", '"')]),
        ("logprobs", ["5", "-1", '"yes"', "{}"]),
        ("top_logprobs", ["2", "true"]),
        ("tools", ["7", '"add"', "[7]", "[{}]", "{}", str(["a"] * 600).replace("'", '"')]),
    ],
)
def test_what_no_engine_can_do_is_refused_by_name_and_no_neighbour_hears_of_it(serve, stage, name, values):
    made = stage(lambda ids: "x", delay_s=0.05)

    async def test(server, stage):
        headers = {"Authorization": f"Bearer {server.api_key}", "Content-Type": "application/json"}
        async with httpx.AsyncClient(base_url=server.url + "/v1", headers=headers) as http:

            def ask(value):
                return http.post("/chat/completions", content=f'{{"messages": {json.dumps(USER)}, "{name}": {value}}}')

            good, *bad = await asyncio.gather(ask("null"), *map(ask, values))
        return good, bad

    good, bad = serve(test, made, shared=made.policy)
    assert good.status_code == 200
    told = [(answer.status_code, (answer.json()["error"]["param"] or "").partition("[")[0]) for answer in bad]
    assert told == [(400, name)] * len(values)
    assert len(made.engine.calls) == 1


def test_an_unexpected_failure_is_an_answer_and_said_once(serve, stage, caplog):
    def broken(ids):
        raise ZeroDivisionError("oh")

    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session, max_retries=0) as one:
            for _ in range(2):
                with pytest.raises(openai.InternalServerError, match="ZeroDivisionError: oh"):
                    await one.chat.completions.create(model="m", messages=USER)

    serve(test, stage(broken))
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_many_episodes_at_once(serve, stage):
    async def test(server, stage):
        async def episode():
            session = server.open(stage.policy())
            messages = list(USER)
            async with httpx.AsyncClient(base_url=session.base_url, timeout=20) as http:
                for turn in range(8):
                    answer = await http.post("/chat/completions", json={"messages": messages})
                    said = answer.json()["choices"][0]["message"]["content"]
                    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": str(turn)}]
            made = rows(session)
            server.close_session(session)
            return made

        found = await asyncio.gather(*(episode() for _ in range(40)))
        return found, len(server.sessions)

    found, left = serve(test, stage(lambda ids: f"a{len(ids)}"))
    assert [len(row.actions) for made in found for row in made] == [8] * 40
    assert left == 0


def test_names_that_no_header_can_have_are_counted_too(serve, stage):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with httpx.AsyncClient(base_url=session.base_url) as http:
            answer = await http.post("/chat/completions", json={"messages": USER, "a\nb": 1, "x" * 99: 1})
        return session, answer

    session, answer = serve(test, stage(lambda ids: "x"))
    assert answer.status_code == 200
    assert answer.headers["x-rlhf-ignored"] == "other"
    assert session.ignored == {"other": 2}


def test_of_several_choices_of_which_one_fails_none_trains(serve, stage):
    words = itertools.count()

    def sometimes(ids):
        if next(words) == 1:
            raise LostError("the engine is gone")
        return "x"

    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session, max_retries=0) as one:
            with pytest.raises(openai.InternalServerError):
                await one.chat.completions.create(model="m", messages=USER, n=3)
        return session

    assert rows(serve(test, stage(sometimes))) == []


def test_text_and_tokens_go_on_from_what_was_said(serve, stage):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one:
            first = await one.completions.create(model="m", prompt="1+1=", logprobs=1)
            said = first.choices[0]
            prompt = [*said.prompt_token_ids, *said.token_ids, *stage.tokenizer.encode("2+2=")]
            second = await one.completions.create(model="m", prompt=prompt, stream=True)
            chunks = [chunk async for chunk in second]
            with pytest.raises(openai.BadRequestError, match="tokens from 0 to"):
                await one.completions.create(model="m", prompt=[-1])
            with pytest.raises(openai.BadRequestError, match="prompt"):
                await one.completions.create(model="m", prompt="")
        return session, said, chunks

    session, said, chunks = serve(test, stage(lambda ids: "two"))
    assert (said.text, said.logprobs.token_logprobs) == ("two", [-0.5] * 4)
    assert chunks[0].choices[0].text == "two"
    [row] = rows(session)
    assert len(row.actions) == 2


def test_metrics_of_a_program_are_bounded_over_its_reports(serve, stage):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with httpx.AsyncClient(base_url=session.base_url) as http:
            told = [
                await http.post("../reward", json={"metrics": {f"{part}-{number}": 1.0 for number in range(60)}})
                for part in (1, 2, 1)
            ]
        return session, [answer.status_code for answer in told]

    session, told = serve(test, stage(lambda ids: "x"))
    assert told == [200, 400, 200]
    assert len(session.metrics) == 60


def test_parameters_of_requests_are_counted_under_a_bounded_number_of_names(serve, stage):
    async def test(server, stage):
        sessions = [server.open(stage.policy()) for _ in range(6)]
        for number, session in enumerate(sessions):
            async with httpx.AsyncClient(base_url=session.base_url) as http:
                odd = {f"odd_{number}_{each}": 1 for each in range(40)}
                answer = await http.post("/chat/completions", json={"messages": USER, **odd})
                assert answer.status_code == 200
        return {name for session in sessions for name in session.ignored}

    names = serve(test, stage(lambda ids: "x"))
    assert len(names) == 101
    assert "other" in names


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("reward", {"metrics": {"a" * 201: 1.0}}, 400),
        ("reward", {"metrics": {"a\nb": 1.0}}, 400),
        ("reward", {"metrics": {"": 1.0}}, 400),
        ("reward", {"metrics": dict.fromkeys(map(str, range(101)), 1.0)}, 400),
        ("reward", {"metrics": ""}, 400),
        ("reward", {"reward": 0.5, "score": 1, "metrics": {"a": 2}, "final": "call-0"}, 200),
        ("reward", {"reward": "much"}, 400),
        ("reward", {"score": 2}, 400),
        ("reward", {"metrics": [1]}, 400),
        ("reward", {"final": "call-9"}, 400),
        ("fail", {"reason": "no sandbox", "retryable": True}, 200),
        ("done", {}, 200),
    ],
)
def test_what_a_program_reports(serve, stage, path, body, status):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with httpx.AsyncClient(base_url=session.base_url) as http:
            await http.post("/chat/completions", json={"messages": USER})
            answer = await http.post(f"../{path}", json=body)
            tokens = await http.post("/tokenize", json={"messages": USER})
            health = await http.get(server.url + "/health")
        return session, answer, tokens, health

    session, answer, tokens, health = serve(test, stage(lambda ids: "x"))
    assert answer.status_code == status
    assert tokens.json()["tokens"] == session.policy.tree.calls[0].prompt_ids
    assert health.json() == {"status": "ok", "episodes": 1}
    if status == 200:
        given = (session.reward, session.score, session.metrics, session.final, session.failed, session.done.is_set())
        assert (
            given
            == {
                "reward": (0.5, 1.0, {"a": 2.0}, "call-0", None, False),
                "fail": (None, None, {}, None, ("no sandbox", True), True),
                "done": (None, None, {}, None, None, True),
            }[path]
        )
