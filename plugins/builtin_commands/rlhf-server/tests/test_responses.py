"""The Responses API with the real client."""

from __future__ import annotations

import httpx
import openai
import pytest

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}]


def client(session):
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)


def test_items_and_their_results_are_one_row(serve, stage):
    said = iter([f"<think>hm</think>let me {CALL}", "it is 3", "bye"])

    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one:
            more = {"model": "m", "tools": TOOLS, "instructions": "Be brief."}
            first = await one.responses.create(input="what is 1?", **more)
            [called] = [item for item in first.output if item.type == "function_call"]
            items = [{"role": "user", "content": "what is 1?"}, *(item.model_dump(exclude_none=True) for item in first.output)]
            items.append({"type": "function_call_output", "call_id": called.call_id, "output": "3"})
            second = await one.responses.create(input=items, **more)
            third = await one.responses.create(input="thanks", previous_response_id=second.id, **more)
        return session, first, second, third

    session, first, second, third = serve(test, stage(lambda ids: next(said)))
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert (first.status, first.output_text, second.output_text, third.output_text) == ("completed", "let me", "it is 3", "bye")
    assert first.usage.output_tokens == len(first.generation_token_ids)
    [row] = session.policy.trajectories()
    assert len(row.actions) == 3


def test_a_stream(serve, stage):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one:
            stream = await one.responses.create(model="m", input="hi", tools=TOOLS, stream=True)
            return [event async for event in stream]

    events = serve(test, stage(lambda ids: "so " + CALL))
    assert [event.type for event in events][:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "so"
    assert [event.delta for event in events if event.type.endswith(".delta")] == ["so", '{"a": 1}']
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_an_answer_that_was_cut_is_incomplete(serve, stage):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one:
            return await one.responses.create(model="m", input="hi", max_output_tokens=2)

    answer = serve(test, stage(lambda ids: "long answer"))
    assert (answer.status, answer.incomplete_details.reason, answer.output_text) == ("incomplete", "max_output_tokens", "lo")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": [3]}, 400, "input[0]"),
        ({"input": [{"type": "image_generation_call"}]}, 400, "input[0].type"),
        ({"input": "x", "instructions": 3}, 400, "instructions"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, 400, "tools[0]"),
        ({"input": "x", "tools": "add"}, 400, "tools"),
        ({"input": "x", "n": 2}, 400, "n"),
        ({"input": "x", "previous_response_id": "resp_9"}, 404, "previous_response_id"),
    ],
)
def test_what_cannot_be_answered_names_what_is_wrong(serve, stage, body, status, param):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with httpx.AsyncClient(base_url=session.base_url) as http:
            return await http.post("/responses", json=body)

    answer = serve(test, stage(lambda ids: "x"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_the_same_tools_write_the_same_prompt_as_in_chat_completions(serve, stage):
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}, "strict": True}

    async def test(server, stage):
        session = server.open(stage.policy())
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="x") as client:
            response = await client.responses.create(model="m", input="hi", tools=[{"type": "function", **function}])
            messages = [{"role": "user", "content": "hi"}]
            chat = await client.chat.completions.create(
                model="m", messages=messages, tools=[{"type": "function", "function": function}]
            )
        return response.prompt_token_ids, chat.choices[0].message.prompt_token_ids

    response, chat = serve(test, stage(lambda ids: "x"))
    assert response == chat
