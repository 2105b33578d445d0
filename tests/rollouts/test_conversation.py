"""The tree of an episode: what a call sees, where it belongs, and that each sampled token trains exactly once."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlhf_host import Episode, EpisodeFailed, Generation, Reply, Task, ToolCall, UserError
from rlhf_host.rollouts.conversation import Tree

EPISODE = Episode("e", "g", Task("q"))
TOOLS = [{"type": "function", "function": {"name": "add"}}]


class Letters:
    """A codec of characters: ``<role|content>`` for each message, ``>`` ends an answer; reasoning of earlier turns goes."""

    def render(self, messages, tools=None):
        return self._ids(f"[{len(tools or ())}]" + "".join(map(self._text, messages)) + "<assistant|")

    def delta(self, last, new, sampled, *, tools=None):
        closing = "" if sampled and sampled[-1] == ord(">") else ">"
        return self._ids(closing + "".join(map(self._text, new)) + "<assistant|")

    def rewrites(self, messages, new, tools=None):
        return any("think" in str(message["content"]) for message in messages if message["role"] == "assistant")

    def _text(self, message):
        return f"<{message['role']}|{message['content']}{json.dumps(message.get('tool_calls', []))}>"

    def _ids(self, text):
        return list(map(ord, text))


def said(text, calls=(), end=">"):
    """An answer, and what is read of it."""
    ids = list(map(ord, text + end))
    return Generation(ids, [-0.5] * len(ids), [1] * len(ids), "stop" if end else "length"), Reply(text, tool_calls=tuple(calls))


def ask(tree, messages, text, tools=None, **more):
    call = tree.begin(tree.plan(messages, tools))
    tree.done(call, *said(text, **more))
    return call


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def texts(row):
    return [(segment.kind, "".join(map(chr, segment.token_ids))) for segment in row.segments]


def test_a_conversation_that_goes_on_is_one_row():
    tree = Tree(Letters())
    first = ask(tree, [user("a")], "b")
    talk = [user("a"), first.reply.message, user("c")]
    second = ask(tree, talk, "d")
    assert second.parent is first
    assert second.why == "extend"
    [row] = tree.rows(EPISODE)
    assert texts(row) == [
        ("prompt", "[0]<user|a[]><assistant|"),
        ("action", "b>"),
        ("observation", "<user|c[]><assistant|"),
        ("action", "d>"),
    ]
    assert row.final
    assert row.parent is None


def test_an_answer_cut_short_is_closed_by_the_template():
    tree = Tree(Letters())
    first = ask(tree, [user("a")], "b", end="")
    ask(tree, [user("a"), first.reply.message, user("c")], "d")
    [row] = tree.rows(EPISODE)
    assert texts(row)[2] == ("observation", "><user|c[]><assistant|")


def test_two_answers_to_one_prompt_are_two_rows_and_a_branch_repeats_what_was_sampled_before():
    tree = Tree(Letters())
    first = ask(tree, [user("a")], "b")
    talk = [user("a"), first.reply.message, user("c")]
    ask(tree, talk, "d")
    ask(tree, talk, "e")
    rows = tree.rows(EPISODE)
    assert [[text for kind, text in texts(row) if kind == "action"] for row in rows] == [["b>", "d>"], ["e>"]]
    assert texts(rows[1])[0] == ("prompt", "[0]<user|a[]><assistant|b><user|c[]><assistant|")
    assert (rows[1].parent, rows[1].branch) == (0, len("[0]<user|a[]><assistant|b>"))
    assert [row.final for row in rows] == [False, True]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda talk, tools: (talk, tools), "extend"),
        (lambda talk, tools: ([user("A"), *talk[1:]], tools), "edited"),
        (lambda talk, tools: ([talk[0], {**talk[1], "content": "B"}, talk[2]], tools), "edited"),
        (lambda talk, tools: ([talk[0], {**talk[1], "content": " b\n"}, talk[2]], tools), "extend"),
        (lambda talk, tools: ([talk[0], {**talk[1], "content": [{"type": "text", "text": "b"}]}, talk[2]], tools), "extend"),
        (lambda talk, tools: ([talk[0], {**talk[1], "reasoning": "hm"}, talk[2]], tools), "extend"),
        (lambda talk, tools: ([system("summary"), talk[2]], tools), "root"),
        (lambda talk, tools: (talk, None), "tools"),
        (lambda talk, tools: ([*talk[:2], {"role": "assistant", "content": "more"}, talk[2]], tools), "edited"),
    ],
)
def test_where_a_changed_conversation_belongs(change, why):
    tree = Tree(Letters())
    first = ask(tree, [user("a")], "b", tools=TOOLS)
    talk, tools = change([user("a"), first.reply.message, user("c")], TOOLS)
    plan = tree.plan(talk, tools)
    assert plan.why == why
    assert (plan.parent is first) == (why == "extend")


def test_calls_of_tools_are_known_by_name_arguments_and_place_not_by_the_program_s_ids():
    tree = Tree(Letters())
    calls = [ToolCall("add", {"a": 1, "b": 2}, "x1"), ToolCall("add", {"a": 3}, "x2")]
    first = ask(tree, [user("a")], "", tools=TOOLS, calls=calls)

    def results(one, other, arguments):
        named = [{"id": one, "type": "function", "function": {"name": "add", "arguments": arguments}}]
        named.append({"id": other, "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}})
        said = {"role": "assistant", "content": None, "tool_calls": named}
        return [user("a"), said, {"role": "tool", "tool_call_id": one, "content": "3"}]

    assert tree.plan(results("x1", "x2", '{"b": 2, "a": 1}'), TOOLS).parent is first
    assert tree.plan(results("own-1", "own-2", {"a": 1, "b": 2}), TOOLS).parent is first
    assert tree.plan(results("x1", "x2", '{"b": 2, "a": 7}'), TOOLS).parent is None
    second = ask(tree, results("y1", "y2", {"a": 1, "b": 2}), "ok", tools=TOOLS)
    again = [*results("z1", "z2", {"a": 1, "b": 2}), second.reply.message, user("and?")]
    assert tree.plan(again, TOOLS).parent is second, "ids differ from turn to turn, places do not"


def test_of_equal_answers_the_one_whose_calls_are_named_is_meant():
    tree = Tree(Letters())
    first = ask(tree, [user("a")], "", calls=[ToolCall("add", {}, "one")])
    second = ask(tree, [user("a")], "", calls=[ToolCall("add", {}, "two")])
    for call in (first, second):
        talk = [user("a"), call.reply.message, {"role": "tool", "tool_call_id": "?", "content": "3"}]
        assert tree.plan(talk).parent is call
    unnamed = {**first.reply.message, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    assert tree.plan([user("a"), unnamed, user("b")]).parent is second


@pytest.mark.parametrize(("history", "why"), [("append", "extend"), ("template", "template")])
def test_what_only_the_template_would_rewrite(history, why):
    tree = Tree(Letters(), history)
    first = ask(tree, [user("a")], "think b")
    assert tree.plan([user("a"), first.reply.message, user("c")]).why == why


def test_history_refused():
    tree = Tree(Letters(), "refuse")
    first = ask(tree, [user("a")], "think b")
    with pytest.raises(EpisodeFailed, match=r"rollout\.history is refuse"):
        tree.plan([user("a"), first.reply.message, user("c")])


@pytest.mark.parametrize("messages", [[], [user("a"), {"role": "assistant", "content": "I"}]])
def test_what_no_answer_can_follow(messages):
    with pytest.raises(UserError):
        Tree(Letters()).plan(messages)


def test_tokens_go_on_from_the_longest_answer_with_which_they_begin():
    tree = Tree()
    first = tree.begin(tree.plan_ids([1, 2]))
    tree.done(first, Generation([3], [-1.0], [0], "stop"))
    second = tree.begin(tree.plan_ids([1, 2, 3, 4]))
    assert second.parent is first
    assert second.added == [4]
    tree.done(second, Generation([5, 6], [-1.0] * 2, [0] * 2, "stop"))
    assert tree.plan_ids([1, 2, 3, 4, 5, 6]).parent is second
    assert tree.plan_ids([1, 2, 3, 9]).parent is first
    assert tree.plan_ids([1, 2]).parent is None
    [row] = tree.rows(EPISODE)
    assert [(segment.kind, list(segment.token_ids)) for segment in row.segments] == [
        ("prompt", [1, 2]),
        ("action", [3]),
        ("observation", [4]),
        ("action", [5, 6]),
    ]


def test_an_answer_that_did_not_arrive_trains_nothing_unless_somebody_goes_on_from_it():
    tree = Tree(Letters())
    lost = ask(tree, [user("a")], "b")
    tree.drop(lost, "undelivered")
    assert tree.rows(EPISODE) == []
    ask(tree, [user("a"), lost.reply.message, user("c")], "d")
    [row] = tree.rows(EPISODE)
    assert [text for kind, text in texts(row) if kind == "action"] == ["b>", "d>"]


class Conversations(RuleBasedStateMachine):
    """Any program: it goes on, branches, edits, compacts, changes tools, asks side by side, loses answers, fails."""

    def __init__(self):
        super().__init__()
        self.tree = Tree(Letters(), numbers=None)
        self.talks = [[user("q")]]
        self.open = []
        self.sampled = {}

    def text(self, index):
        return chr(0x100 + len(self.tree.calls)) + "xyz"[index % 3]

    @rule(talk=st.integers(0, 10**6), tools=st.booleans())
    def asks(self, talk, tools):
        messages = self.talks[talk % len(self.talks)]
        call = self.tree.begin(self.tree.plan(messages, TOOLS if tools else None))
        self.open.append((call, messages))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 10**6), same=st.booleans(), cut=st.booleans())
    def is_answered(self, which, same, cut):
        call, messages = self.open.pop(which % len(self.open))
        self.tree.done(call, *said("same" if same else self.text(which), end="" if cut else ">"))
        self.sampled[call] = messages
        self.talks.append([*messages, call.reply.message, user(f"u{which % 5}")])

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 10**6), status=st.sampled_from(["failed", "cancelled"]))
    def fails(self, which, status):
        call, _ = self.open.pop(which % len(self.open))
        self.tree.drop(call, status, "no reason")

    def leaves(self):
        return [call for call in self.sampled if not any(other.parent is call for other in self.tree.calls)]

    @precondition(leaves)
    @rule(which=st.integers(0, 10**6))
    def is_lost(self, which):
        leaves = self.leaves()
        self.tree.drop(leaves[which % len(leaves)], "undelivered")

    @rule(talk=st.integers(0, 10**6), place=st.integers(0, 10**6))
    def edits(self, talk, place):
        messages = list(self.talks[talk % len(self.talks)])
        place %= len(messages)
        messages[place] = {**messages[place], "content": messages[place]["content"] + "!"}
        self.talks.append(messages)

    @rule(talk=st.integers(0, 10**6))
    def compacts(self, talk):
        self.talks.append([system("what was said so far"), self.talks[talk % len(self.talks)][-1]])

    @invariant()
    def every_action_trains_once_after_what_it_saw(self):
        rows = self.tree.rows(EPISODE)
        trained = []
        for row in rows:
            seen = []
            for segment in row.segments:
                if segment.kind == "action":
                    trained.append((tuple(seen), tuple(segment.token_ids)))
                seen += segment.token_ids
            assert row.actions, "a row without an answer of its own trains nothing"
        kept = [call for call in self.tree.calls if call.status == "done"]
        saw = [(tuple(call.prompt_ids), tuple(call.generation.token_ids)) for call in kept]
        assert sorted(trained) == sorted(saw)
        assert sum(row.final for row in rows) == bool(rows)
        for row in rows:
            if row.parent is not None:
                tokens = [token for segment in rows[row.parent].segments for token in segment.token_ids]
                assert row.parent < row.row
                assert list(row.prompt_ids)[: row.branch] == tokens[: row.branch]

    @invariant()
    def a_call_that_goes_on_sees_exactly_what_was_sampled(self):
        for call in self.tree.calls:
            if call.parent is not None:
                before = [*call.parent.prompt_ids, *call.parent.generation.token_ids]
                assert call.prompt_ids[: len(before)] == before
                assert call.begins == len(call.prompt_ids)
            else:
                assert call.why in ("root", "edited", "tools")


TestConversations = Conversations.TestCase
TestConversations.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
