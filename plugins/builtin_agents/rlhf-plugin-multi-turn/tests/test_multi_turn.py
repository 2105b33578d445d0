"""Tools: what the policy sees of them, and what it is told of its mistakes."""

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rlhf_plugin_multi_turn import MultiTurn, Retry
from rlhf_plugin_multi_turn.retry import right
from rlhf_plugin_multi_turn.text_calls import read_calls
from rlhf_plugin_multi_turn.tools import shortened

from rlhf_host import Action, Episode, EpisodeFailed, Reply, Task, ToolCall, UserError, import_file

TOOLS = str(Path(__file__).parent / "some_tools.py")


def agent(native=True, **options):
    made = MultiTurn(MultiTurn.Options(tools=TOOLS, tool_format="native" if native else "text", **options))
    episode = Episode("e", "g", Task("q", "3"))
    return made, episode


def answer(*calls, problems=(), text=""):
    reply = Reply(
        text,
        tool_calls=tuple(ToolCall(name, arguments, f"id{n}") for n, (name, arguments) in enumerate(calls)),
        problems=problems,
    )
    return Action(text, [1], "stop", parse=lambda: reply)


def step(calls, problems=(), log=None, **options):
    """The agent's answer to calls of the policy."""
    made, episode = agent(**options)
    episode.events = [] if log is None else log

    async def play():
        await made.agent_reset(episode)
        return await made.agent_step(episode, answer(*calls, problems=problems))

    return asyncio.run(play())


def test_the_policy_sees_the_tools_and_their_results():
    made, episode = agent()
    first = asyncio.run(made.agent_reset(episode))
    assert [schema["function"]["name"] for schema in first.tools] == ["add", "slow", "hang", "fail", "gone", "long"]
    assert first.observation == [{"role": "user", "content": "q"}]
    got = step([("add", {"a": 1, "b": 2})])
    assert got.observation == [{"role": "tool", "name": "add", "tool_call_id": "id0", "content": "3"}]
    assert not got.done
    assert got.metrics["tools/add/calls"] == 1
    assert step([]).done, "an answer without a call ends the episode"


@pytest.mark.parametrize(
    ("call", "told", "counted"),
    [
        (("sub", {}), "Error: there is no tool 'sub'; there are add, slow", "tools/unknown/errors"),
        (("add", {"a": 1}), "Error: wrong arguments: missing a required argument: 'b'", "tools/add/errors"),
        (
            ("add", {"a": 1, "b": 2, "c": 3}),
            "Error: wrong arguments: got an unexpected keyword argument 'c'",
            "tools/add/errors",
        ),
        (("add", {"a": 1, "b": "x"}), "Error: TypeError: unsupported operand", "tools/add/errors"),
        (("fail", {"text": "ouch"}), "Error: ValueError: ouch", "tools/fail/errors"),
        (("slow", {"s": 60}), "Error: slow took longer than 0.4 s", "tools/slow/timeouts"),
        (("hang", {"s": 4}), "Error: hang took longer than 0.4 s", "tools/hang/timeouts"),
    ],
)
def test_what_goes_wrong_is_told_to_the_policy(call, told, counted):
    started = time.monotonic()
    got = step([call], tool_timeout_s=0.4)
    assert got.observation[0]["content"].startswith(told)
    assert got.metrics[counted] == 1
    assert time.monotonic() - started < 3.9


def test_calls_are_in_the_episode_s_log():
    log = []
    step([("add", {"a": 1, "b": 2}), ("sub", {})], problems=("odd",), log=log)
    assert [event["kind"] for event in log] == ["malformed", "tool", "tool"]
    told = [(event["name"], event["arguments"], event["result"][:8], event["ok"]) for event in log[1:]]
    assert told == [("add", {"a": 1, "b": 2}, "3", True), ("sub", {}, "Error: t", False)]


def test_a_tool_may_end_the_episode():
    with pytest.raises(EpisodeFailed, match="the machine is gone"):
        step([("gone", {})])


@pytest.mark.parametrize(
    ("parallel", "events"), [(True, ["begins", "begins", "ends", "ends"]), (False, ["begins", "ends", "begins", "ends"])]
)
def test_calls_run_side_by_side_or_in_their_order(parallel, events):
    seen = import_file(TOOLS, "tools").EVENTS
    seen.clear()
    got = step([("slow", {"s": 0.1}), ("slow", {"s": 0.1})], parallel_tools=parallel)
    assert [seen["content"] for seen in got.observation] == ["0.1", "0.1"]
    assert seen == events


def test_long_results_keep_head_and_tail():
    [seen] = step([("long", {})], max_tool_chars=100).observation
    assert seen["content"] == "a" * 50 + "\n[... 1100 characters left out ...]\n" + "b" * 50
    assert shortened("a" * 100, 100) == "a" * 100


def test_a_call_that_cannot_be_read_is_told_or_ends():
    told = step([], problems=("unreadable: x",))
    assert told.observation == [{"role": "user", "content": "This tool call cannot be read: unreadable: x"}]
    assert told.metrics["agent/malformed_calls"] == 1
    assert step([], problems=("unreadable: x",), on_malformed="end").done


def test_the_last_turn_ends_whatever_it_says():
    assert step([("add", {"a": 1, "b": 2})], max_turns=1).done


def test_tools_as_text():
    made, episode = agent(native=False)
    first = asyncio.run(made.agent_reset(episode))
    assert first.tools is None
    [message] = first.observation
    assert '"name": "add"' in message["content"]
    assert message["content"].endswith("\n\nq")
    text = 'so <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    got = asyncio.run(made.agent_step(episode, Action(text, [1], "stop")))
    assert got.observation == [{"role": "user", "content": "<tool_response>\n3\n</tool_response>"}]


@pytest.mark.parametrize(
    "text", ["<tool_call>", "<tool_call>{</tool_call>", '<tool_call>{"a": 1}</tool_call>', "<tool_call>[1]</tool_call>"]
)
def test_calls_in_text_that_cannot_be_read(text):
    calls, problems = read_calls(text)
    assert (calls, len(problems)) == ([], 1)


@pytest.mark.parametrize(
    ("template", "data", "native"),
    [
        ("{{ tools }} {{ message.tool_calls }}", {}, True),
        ("{{ messages }}", {}, False),
        (None, {}, False),
        ("tools tool_calls", {"template": "none"}, False),
    ],
)
def test_the_form_follows_the_chat_template(template, data, native):
    made = MultiTurn(MultiTurn.Options(tools=TOOLS))
    made.run_started(SimpleNamespace(config={"data": data}, tokenizer=SimpleNamespace(chat_template=template)))
    assert made.native == native


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nowhere.py", "there is no Python file"),
        (f"{TOOLS}:sub", "it has no function 'sub'; it has add, slow"),
        ("{tmp}/broken.py", "importing .*broken.py failed: NameError"),
        ("{tmp}/empty.py", "the file defines no function"),
        ("{tmp}/bare.py", r"no schema for bare: .*give it types"),
    ],
)
def test_bad_tools_are_refused_at_the_start(place, message, tmp_path):
    (tmp_path / "broken.py").write_text("def f(): pass\nx = y\n")
    (tmp_path / "empty.py").write_text("import os\n")
    (tmp_path / "bare.py").write_text("def bare(x):\n    return x\n")
    with pytest.raises(UserError, match=message):
        MultiTurn(MultiTurn.Options(tools=place.replace("{tmp}", str(tmp_path))))


def test_some_of_a_file_s_functions():
    made = MultiTurn(MultiTurn.Options(tools=f"{TOOLS}:add,slow"))
    assert list(made.tools.functions) == ["add", "slow"]


# --- another try ---------------------------------------------------------------------------------


def tries(*texts, label="3", **options):
    made, episode = Retry(Retry.Options(**options)), Episode("e", "g", Task("1+2=", label))

    async def play():
        await made.agent_reset(episode)
        return [await made.agent_step(episode, Action(text, [1], "stop")) for text in texts]

    return asyncio.run(play())


def test_a_wrong_answer_gets_another_try():
    first, second = tries("4", "3", feedback="{prompt} is not {answer}: ", penalty=0.25)
    assert first.observation == "1+2= is not 4: "
    assert (second.done, second.reward, second.score) == (True, 0.75, 1.0)
    assert second.metrics == {"retry/tries": 2.0, "retry/first": 0.0, "retry/later": 1.0}
    [only] = tries("3")
    assert (only.done, only.reward, only.metrics) == (True, 1.0, {"retry/tries": 1.0, "retry/first": 1.0})
    assert [one.reward for one in tries("4", "5")] == [None, 0.0]


def test_a_task_without_a_label_has_failed():
    with pytest.raises(EpisodeFailed, match="no label"):
        tries("3", label=None)
    assert Retry(Retry.Options()).check_labels([Task("p", "3"), Task("p")]).keys() == {1}


def test_an_own_check(tmp_path):
    (tmp_path / "check.py").write_text("async def longer(text, label):\n    return len(text) > len(label)\n")
    [only] = tries("long", check=f"{tmp_path}/check.py:longer")
    assert only.done
    (tmp_path / "check.py").write_text("def a(t, l): ...\ndef b(t, l): ...\n")
    with pytest.raises(UserError, match=r"give one function, FILE\.py:NAME; it has a, b"):
        tries("x", check=f"{tmp_path}/check.py")


@pytest.mark.parametrize(
    ("text", "label", "good"),
    [
        ("it is 3", "3", True),
        ("3 or 4", "3", False),
        ("1,200", 1200, True),
        ("Paris", "Paris", True),
        ("it is 46", "The sum is <<12+34=46>>.\n#### 46", True),
        ("it is 12", "The sum is <<12+34=46>>.\n#### 46", False),
        ("46", "\\boxed{46}", True),
        ("46", "$46", True),
        ("46", 46.0, True),
        ("46", "between 45 and 46", False),
        ("$42.00", "42", True),
        ("It lies in 3-5", "5", True),
        ("it is -5", "5", False),
        ("", "3", False),
        ("-3", "3", False),
    ],
)
def test_right(text, label, good):
    assert right(text, label) == good


def test_results_that_are_no_text_are_json():
    assert json.loads(step([("add", {"a": 1.5, "b": 1})]).observation[0]["content"]) == 2.5
