"""Stop texts: not in what a client reads, and still in what was sampled."""

from __future__ import annotations

from dataclasses import replace

import openai
import pytest

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
USER = {"role": "user", "content": "hi"}


def client(session):
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)


def ask(serve, made, **more):
    """One answer of the chat, and its session."""

    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one:
            return session, (await one.chat.completions.create(model="policy", messages=[USER], **more)).choices[0]

    return serve(test, made)


def test_no_answer_has_the_stop_text_and_its_tokens_do(serve, stage):
    made = stage(lambda ids: "46")

    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one:
            ask = {"model": "policy", "stop": ["6", "x"]}
            chat = await one.chat.completions.create(messages=[USER], **ask)
            text = await one.completions.create(prompt="1+1=", **ask)
            streams = [
                await one.chat.completions.create(messages=[USER], stream=True, **ask),
                await one.completions.create(prompt="1+1=", stream=True, **ask),
            ]
            parts = [[chunk.choices[0] async for chunk in stream] for stream in streams]
            response = await one.responses.create(model="policy", input="hi", extra_body={"stop": "6"})
            return chat.choices[0], text.choices[0], parts, response

    chat, text, (said, written), response = serve(test, made)
    assert (chat.message.content, chat.finish_reason) == ("4", "stop")
    assert made.tokenizer.decode(chat.message.generation_token_ids, skip_special_tokens=True) == "46"
    assert (text.text, text.finish_reason, made.tokenizer.decode(text.token_ids[:2])) == ("4", "stop", "46")
    assert "".join(part.delta.content or "" for part in said) == "4"
    assert "".join(part.text for part in written) == "4"
    assert response.output_text == "4"


@pytest.mark.parametrize("again", ["", "6"])
def test_a_message_with_or_without_the_stop_text_goes_on_from_the_sampled_tokens(serve, stage, again):
    said = iter(["46", "done"])

    async def test(server, stage):
        session = server.open(stage.policy())
        async with client(session) as one:
            messages = [USER]
            first = await one.chat.completions.create(model="policy", messages=messages, stop="6")
            content = first.choices[0].message.content + again
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "and?"}]
            second = await one.chat.completions.create(model="policy", messages=messages)
        return session, first.choices[0].message, second.choices[0].message

    session, first, second = serve(test, stage(lambda ids: next(said)))
    [row] = session.policy.trajectories()
    assert len(row.actions) == 2
    assert list(row.actions[0].token_ids) == first.generation_token_ids
    whole = [token for segment in row.segments for token in segment.token_ids]
    assert second.prompt_token_ids + second.generation_token_ids == whole


def test_spaces_of_a_stop_text_count(serve, stage):
    _, answer = ask(serve, stage(lambda ids: f"so {CALL}\nResult: "), tools=TOOLS, stop="Result: ")
    assert (answer.message.content, answer.finish_reason) == ("so", "tool_calls")
    _, answer = ask(serve, stage(lambda ids: "<think>hm</think>two \n\nUser: "), stop="User: ")
    assert answer.message.content == "two"


def test_a_thought_ends_before_the_stop_text_too(serve, stage):
    _, answer = ask(serve, stage(lambda ids: "<think>first SECOND"), stop="SECOND")
    assert "SECOND" not in answer.message.model_dump_json(include={"content", "reasoning_content"})


def test_a_stop_text_that_ends_a_call_leaves_it_a_call(serve, stage):
    session, answer = ask(serve, stage(lambda ids: CALL), tools=TOOLS, stop="</tool_call>")
    assert answer.message.tool_calls[0].function.name == "add"
    assert len(session.policy.trajectories()) == 1


def test_stop_texts_of_the_run_stay(serve, stage):
    made = stage(lambda ids: "<answer>4</answer>")
    made.settings = replace(made.settings, sampling=replace(made.settings.sampling, stop=("</answer>",)))
    assert ask(serve, made)[1].message.content == "<answer>4</answer>"
