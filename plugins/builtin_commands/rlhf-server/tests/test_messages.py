"""Anthropic's API with the real client."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from rlhf_server.limits import Limits

from rlhf_host.errors import LostError

anthropic = pytest.importorskip("anthropic", reason="comes with make setup-distributed")
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}]
HI = [{"role": "user", "content": "hi"}]


def client(session):
    return anthropic.AsyncAnthropic(base_url=session.base_url.removesuffix("/v1"), api_key=session.api_key, max_retries=0)


def ask(serve, stage, say, *asked, **settings):
    """Answers to requests of one episode, or their errors, and the episode's session."""

    async def test(server, stage):
        session = server.open(stage.policy())
        answers = []
        async with client(session) as one:
            for each in asked:
                try:
                    answers.append(await one.messages.create(**{"model": "m", "max_tokens": 100, "messages": HI, **each}))
                except anthropic.APIStatusError as error:
                    answers.append(error)
        return session, answers

    said = iter([say]) if isinstance(say, str) else iter(say)
    last = []

    def script(ids):
        last[:] = [next(said, *last)]
        return last[0]

    return serve(test, stage(script, **settings))


def test_a_conversation_with_tools_is_one_row(serve, stage):
    said = iter([f"<think>hm</think>let me {CALL}", "it is 3", "bye"])

    async def test(server, stage):
        session = server.open(stage.policy())
        more = {"model": "m", "max_tokens": 100, "tools": TOOLS, "system": "Be brief."}
        async with client(session) as one:
            talk = [{"role": "user", "content": "what is 1?"}]
            first = await one.messages.create(messages=talk, **more)
            [use] = [block for block in first.content if block.type == "tool_use"]
            result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "3"}]}
            talk += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            second = await one.messages.create(messages=talk, **more)
            talk += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "thanks"}]
            third = await one.messages.create(messages=talk, **more)
        return session, first, second, third

    session, first, second, third = serve(test, stage(lambda ids: next(said)))
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert (first.content[1].text, first.content[2].name, first.content[2].input) == ("let me", "add", {"a": 1})
    assert [each.stop_reason for each in (first, second, third)] == ["tool_use", "end_turn", "end_turn"]
    assert (second.content[0].text, third.content[0].text) == ("it is 3", "bye")
    assert first.usage.output_tokens == len(first.generation_token_ids) == len(first.generation_log_probs)
    assert first.usage.input_tokens == len(first.prompt_token_ids)
    [row] = session.policy.trajectories()
    assert len(row.actions) == 3
    assert row.actions[0].token_ids == first.generation_token_ids
    assert list(row.actions[0].logprobs) == first.generation_log_probs
    text = session.policy.tokenizer.decode(row.prompt_ids)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in text
    assert '"parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}' in text


@pytest.mark.parametrize("tools", [TOOLS, []])
def test_a_stream(tools, serve, stage):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with (
            client(session) as one,
            one.messages.stream(model="m", max_tokens=100, messages=HI, tools=tools) as stream,
        ):
            kinds = [event.type async for event in stream]
            return kinds, await stream.get_final_message()

    kinds, whole = serve(test, stage(lambda ids: "so " + (CALL if tools else "x")))
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert whole.content[0].text == ("so" if tools else "so x")
    assert whole.stop_reason == ("tool_use" if tools else "end_turn")
    assert whole.usage.output_tokens > 2
    assert len(whole.generation_token_ids) == whole.usage.output_tokens
    if tools:
        assert whole.content[1].input == {"a": 1}


def test_why_an_answer_ended(serve, stage):
    ends = [{"max_tokens": 2}, {"stop_sequences": ["d", "b"]}, {}]
    _, answers = ask(serve, stage, "a b c", *ends)
    assert [(each.stop_reason, each.stop_sequence) for each in answers] == [
        ("max_tokens", None),
        ("stop_sequence", "b"),
        ("end_turn", None),
    ]
    assert answers[1].content[0].text == "a "


def test_of_several_stop_sequences_the_first_in_the_text_ended_it(serve, stage):
    _, [answer] = ask(serve, stage, "a bc", {"stop_sequences": ["c", "bc"]})
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("a ", "stop_sequence", "bc")


def test_several_calls_and_their_results(serve, stage):
    both = f"{CALL}\n{CALL.replace('1', '2')}"
    said = iter([both, "5 and 7"])

    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one:
            more = {"model": "m", "max_tokens": 200, "tools": [*TOOLS, {**TOOLS[0], "name": "times"}]}
            async with one.messages.stream(messages=HI, **more) as stream:
                first = await stream.get_final_message()
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": str(4 + 2 * place)}
                for place, block in enumerate(first.content)
            ]
            talk = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
            return session, first, await one.messages.create(messages=talk, **more)

    session, first, second = serve(test, stage(lambda ids: next(said)))
    assert [(block.type, block.name, block.input) for block in first.content] == [
        ("tool_use", "add", {"a": 1}),
        ("tool_use", "add", {"a": 2}),
    ]
    assert len({block.id for block in first.content}) == 2
    assert second.content[0].text == "5 and 7"
    assert len(session.policy.trajectories()) == 1, "the second request goes on from the first"
    text = session.policy.tokenizer.decode(second.prompt_token_ids)
    assert text.index("<tool_response>\n4") < text.index("<tool_response>\n6")


def test_an_engine_that_goes_during_a_stream_is_the_client_s_error(serve, stage, monkeypatch):
    monkeypatch.setattr("rlhf_server.app.KEEPALIVE_S", 0.02)

    def gone(ids):
        raise LostError("the engine is gone")

    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one:
            with pytest.raises(anthropic.APIStatusError, match="the engine is gone") as error:
                async with one.messages.stream(model="m", max_tokens=9, messages=HI) as stream:
                    await stream.get_final_message()
        return error.value

    error = serve(test, stage(gone, delay_s=0.2))
    assert error.body["error"]["type"] == "api_error"


def test_too_many_requests_are_the_client_s_error(serve, stage):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one:
            ask = {"model": "m", "max_tokens": 9, "messages": HI}
            told = await asyncio.gather(*(one.messages.create(**ask) for _ in range(2)), return_exceptions=True)
        return told

    told = serve(test, stage(lambda ids: "x", delay_s=0.2), limits=Limits(calls_at_once=1))
    [error] = [one for one in told if isinstance(one, Exception)]
    assert isinstance(error, anthropic.RateLimitError)
    assert error.body["error"]["type"] == "rate_limit_error"


def test_an_empty_answer_has_no_block(serve, stage):
    _, [answer] = ask(serve, stage, "", {})
    assert (answer.content, answer.stop_reason) == ([], "end_turn")


def test_tool_choice_none_leaves_tools_out(serve, stage):
    _, answers = ask(serve, stage, "x", {"tools": TOOLS, "tool_choice": {"type": "none"}}, {"tools": TOOLS})
    short, long = (answer.usage.input_tokens for answer in answers)
    assert long > short + 50


def test_what_has_no_effect_is_named(serve, stage):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one:
            choice = {"type": "any", "disable_parallel_tool_use": True}
            tools = [{**tool, "cache_control": {"type": "ephemeral"}, "stream": True} for tool in TOOLS]
            more = {"extra_body": {"temperature": 0.3, "top_k": 5}, "tools": tools, "tool_choice": choice}
            answer = await one.messages.with_raw_response.create(model="m", max_tokens=9, messages=HI, **more)
        return answer.headers["x-rlhf-ignored"], answer.headers["x-rlhf-version"]

    ignored, version = serve(test, stage(lambda ids: "x"))
    assert set(ignored.split(",")) == {
        *("temperature", "top_k", "tool_choice", "disable_parallel_tool_use"),
        *("tools.cache_control", "tools.stream"),
    }
    assert version == "0"


def block(**fields):
    return {"messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"messages": []}, "messages: a list of messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, r"messages\[0\]: an object with a role of user, assistant"),
        (block(type="document", source={}), r"messages\[0\].content\[0\]: a block of the type text; .*'document'"),
        (
            block(type="image", source={"type": "url", "url": "http://x"}),
            r"messages\[0\].content\[0\].source: a picture in base64",
        ),
        (block(type="image", source={"type": "base64", "media_type": "image/png", "data": "x"}), r"messages\[0\].content"),
        (block(type="image", source={"type": "base64", "media_type": "image/png", "data": PNG}), "picture"),
        (block(type="tool_result", content="x"), "tool_use_id: a text"),
        ({"messages": [*HI, {"role": "assistant", "content": "I"}]}, "assistant"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\]: .*web_search_20250305"),
        ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers: servers of tools are the program's own"),
        ({"extra_body": {"output_format": {"type": "json_schema"}}}, "output_format: tokens come from the run's own"),
        ({"extra_body": {"tool_choice": "auto"}}, "tool_choice: an object of the type auto"),
        ({"stop_sequences": [""]}, "stop_sequences: a text"),
        (
            block(type="tool_result", tool_use_id="t", content=[{"type": "text", "text": "x"}, {"type": "document"}]),
            r"messages\[0\].content\[0\].content\[1\]: a block of the type text; .*'document'",
        ),
        ({"max_tokens": 0}, "max_tokens: an integer from 1"),
        ({"system": [{"type": "image"}]}, r"system\[0\]: a block of the type text"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(asked, param, serve, stage):
    _, [error] = ask(serve, stage, "x", asked)
    assert isinstance(error, anthropic.BadRequestError)
    told = error.body
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    with pytest.raises(AssertionError, match=param):
        raise AssertionError(told["error"]["message"])


def test_max_tokens_is_needed(serve, stage):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with httpx.AsyncClient() as http:
            return (await http.post(f"{session.base_url}/messages", json={"messages": HI})).json()

    assert serve(test, stage(lambda ids: "x"))["error"]["message"] == "max_tokens: missing: the longest answer, in tokens"


def test_an_error_of_a_tool_is_told(serve, stage):
    use = {"type": "tool_use", "id": "t", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "ouch", "is_error": True}
    talk = [
        *HI,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
    ]
    session, [answer] = ask(serve, stage, "x", {"messages": talk, "tools": TOOLS})
    text = session.policy.tokenizer.decode(answer.prompt_token_ids)
    assert "<tool_response>\nError: ouch\n</tool_response><|im_end|><|im_start|>user\ngo on<|im_end|>" in text


def test_errors_of_the_episode_have_the_client_s_kinds(serve, stage):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one:
            long = [{"role": "user", "content": "x" * 3000}]
            with pytest.raises(anthropic.BadRequestError, match="maximum context length is 2000"):
                await one.messages.create(model="m", max_tokens=9, messages=long)
            server.close_session(session)
            with pytest.raises(anthropic.APIStatusError) as over:
                await one.messages.create(model="m", max_tokens=9, messages=HI)
        return over.value

    over = serve(test, stage(lambda ids: "x"))
    assert (over.status_code, over.body["error"]["code"]) == (410, "episode_over")


def test_tokens_are_counted(serve, stage):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one:
            counted = await one.messages.count_tokens(model="m", messages=HI, tools=TOOLS)
            answer = await one.messages.create(model="m", max_tokens=9, messages=HI, tools=TOOLS)
        return counted.input_tokens, answer.usage.input_tokens

    counted, used = serve(test, stage(lambda ids: "x"))
    assert counted == used


def test_the_key_of_a_served_model(serve, stage):
    async def test(server, stage):
        told = []
        for key in (server.api_key, "wrong"):
            async with anthropic.AsyncAnthropic(base_url=server.url, api_key=key, max_retries=0) as one:
                try:
                    told.append((await one.messages.create(model="policy", max_tokens=9, messages=HI)).content[0].text)
                except anthropic.AuthenticationError as error:
                    told.append(error.body["error"]["type"])
        return told

    one = stage(lambda ids: "x")
    assert serve(test, one, shared=one.policy) == ["x", "authentication_error"]


def test_a_final_answer_may_be_named_by_its_id(serve, stage):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one, httpx.AsyncClient() as http:
            first = await one.messages.create(model="m", max_tokens=9, messages=HI)
            url = session.base_url.removesuffix("/v1") + "/reward"
            return (await http.post(url, json={"reward": 1, "final": first.id})).status_code, session.final

    code, final = serve(test, stage(lambda ids: "x"))
    assert code == 200
    assert final
