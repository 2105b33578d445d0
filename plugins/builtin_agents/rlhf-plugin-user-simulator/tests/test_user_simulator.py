"""Conversations with a scripted user: who reads what, how they end, what fails, and training by the real command line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from rlhf_authoring.models import TOOLS_TEMPLATE, byte_tokenizer
from rlhf_plugin_user_simulator import UserSimulator, profile
from rlhf_plugin_user_simulator.profile import profile_of
from rlhf_plugin_user_simulator.user import seed_of
from transformers import LlamaConfig, LlamaForCausalLM

import rlhf_host
from rlhf_host import Episode, EpisodeFailed, NoRoom, Task, UserError

from .users import Assistant, User

GOAL = {"goal": "Book a table for two.", "persona": "Short of time."}


def task(prompt="Hello, a table please.", **user):
    return Task(prompt, metadata={"user": {**GOAL, **user}})


def play(policy, row=None, url=None, run_dir=None, sample=0, **options):
    """The row, the episode, and the step's metrics."""
    if url is not None:
        options = {"model": "m", "base_url": url, **options}
    agent, episode = UserSimulator(UserSimulator.Options(**options)), Episode("e", "g", row or task(), sample=sample, seed=7)

    async def run():
        await agent.run_started(SimpleNamespace(run_dir=run_dir, seed=0))
        try:
            [found] = await agent.agent_run(episode, policy)
            return found
        finally:
            await agent.run_finished(None)

    found = asyncio.run(run())
    return found, episode, {metric.name: metric.values for metric in agent.step_metrics()}


def script(*words):
    return lambda messages, number: words[number - 1]


def test_the_user_and_the_policy_take_turns_until_the_user_is_done():
    policy = Assistant("For when?", "Booked for eight.")
    with User(script("Tonight at eight.", "Thanks! [DONE]")) as user:
        row, episode, measured = play(policy, url=user.url)
    assert row.agent_rewards == [None, 1.0]
    assert row.score == 1.0
    metrics = {"turns": 2.0, "done": 1.0, "gave_up": 0.0, "unfinished": 0.0, "late_searches": 0.0}
    assert row.metrics == {f"user/{name}": value for name, value in metrics.items()}
    first, second = policy.talks
    assert first == [{"role": "user", "content": "Hello, a table please."}]
    assert second == [*first, {"role": "assistant", "content": "For when?"}, {"role": "user", "content": "Tonight at eight."}]
    system, *seen = user.asked[1]["messages"]
    assert [message["role"] for message in seen] == ["user", "assistant", "user", "assistant", "user"]
    assert [message["content"] for message in seen][1:] == [
        "Hello, a table please.",
        "For when?",
        "Tonight at eight.",
        "Booked for eight.",
    ]
    assert system["role"] == "system"
    assert all(text in system["content"] for text in ("Book a table for two.", "Short of time.", "[DONE]", "[GIVE UP]"))
    assert "system" not in [message["role"] for message in second], "the policy does not read the user's goal"
    assert [(event["turn"], event["ending"]) for event in episode.events] == [(1, None), (2, "done")]
    assert (measured["calls"], measured["failed"], measured["tokens_in"], measured["tokens_out"]) == (2, 0, 200, 20)
    assert [body["seed"] for body in user.asked] == [seed_of(episode, 1), seed_of(episode, 2)]


def test_the_user_opens_where_the_prompt_has_no_message_of_it():
    policy = Assistant("Done.")
    row = task([{"role": "system", "content": "You book tables."}])
    with User(script("A table, quick.", "Bye. [GIVE UP]")) as user:
        found, _, _ = play(policy, row, user.url)
    assert policy.talks == [[{"role": "system", "content": "You book tables."}, {"role": "user", "content": "A table, quick."}]]
    assert found.score == 0.0
    assert found.metrics["user/gave_up"] == 1.0


def test_episodes_of_a_group_begin_with_the_same_words_and_go_on_with_their_own():
    episodes = [Episode("e", "g", task(), sample=sample, seed=7) for sample in range(3)]
    assert len({seed_of(episode, 0) for episode in episodes}) == 1
    assert len({seed_of(episode, turn) for episode in episodes for turn in (1, 2)}) == 6
    assert all(0 <= seed_of(episode, 1) < 2**31 for episode in episodes)


def test_what_was_said_is_known_in_a_resumed_run(tmp_path):
    with User(script("Tonight.", "[DONE]")) as user:
        for _ in range(2):
            found, _, measured = play(Assistant("For when?", "Booked."), url=user.url, run_dir=tmp_path)
            assert found.score == 1.0
        assert len(user.asked) == 2
        assert (measured["calls"], measured["cached"]) == (0, 2)
    with User(script("Tonight.", "[DONE]", "Tonight.", "[DONE]")) as user:
        for sample in range(2):
            play(Assistant("For when?", "Booked."), url=user.url, run_dir=tmp_path / "greedy", sample=sample, temperature=0.0)
        assert len(user.asked) == 2, "greedy words are the same for every sample"
        assert "seed" not in user.asked[0]


@pytest.mark.parametrize(
    ("success", "answers", "met"),
    [
        ({"contains": ["EIGHT", "two"]}, ("Two people?", "Booked at eight."), 1.0),
        ({"contains": ["eight", "three"]}, ("Two people?", "Booked at eight."), 0.0),
        ({"matches": r"\b[78] pm\b"}, ("Booked.", "At 8 pm."), 1.0),
        ({"matches": r"(a+)+$", "contains": None}, ("a" * 40 + "b", "."), 0.0),
        ("user", ("Two people?", "Booked."), 1.0),
        ("rewards", ("Two people?", "Booked."), None),
    ],
)
def test_a_row_says_how_success_is_judged(success, answers, met):
    with User(script("And?", "Well. [DONE]")) as user:
        row, _, _ = play(Assistant(*answers), task(success=success), user.url)
    assert row.score == met
    assert row.agent_rewards == ([] if met is None else [None, met])


def test_a_search_that_takes_too_long_is_counted_and_lets_others_go_on(monkeypatch):
    monkeypatch.setattr(profile, "PATTERN_S", 0.05)
    ticks, late = [], {"matches": r"(a|aa)+$"}

    async def run():
        async def tick():
            while True:
                ticks.append(time.monotonic())
                await asyncio.sleep(0.005)

        ticking = asyncio.ensure_future(tick())
        agent = UserSimulator(UserSimulator.Options(role="user"))
        policy = Assistant("a" * 60 + "b", "Booked.")
        policy.talk_of_user = ["And?", "[DONE]"]
        [row] = await agent.agent_run(Episode("e", "g", task(success=late), seed=7), policy)
        ticking.cancel()
        return row

    row = asyncio.run(run())
    assert (row.score, row.metrics["user/late_searches"]) == (0.0, 1.0)
    assert len(ticks) > 3, "nothing else went on while it searched"
    found = profile_of(task(success=late), "user", "user")
    assert found.met(["a" * 60 + "b", "a" * 3]) == (True, 1), "another answer has it"


def test_a_conversation_that_does_not_end_is_no_success():
    with User(lambda messages, number: "And?") as user:
        row, _, _ = play(Assistant("a", "b"), url=user.url, max_turns=2)
        assert (row.score, row.metrics["user/unfinished"], row.metrics["user/turns"]) == (0.0, 1.0, 2.0)
        row, _, _ = play(Assistant("a", NoRoom("full")), url=user.url)
        assert (row.score, row.metrics["user/unfinished"], row.metrics["user/turns"]) == (0.0, 1.0, 1.0)
        with pytest.raises(NoRoom):
            play(Assistant(NoRoom("full")), url=user.url)


def test_marks_in_the_policys_words_do_not_reach_the_user():
    with User(script("And?", "Bye. [GIVE UP]")) as user:
        play(Assistant("Say [DONE]. [DO[GIVE UP]NE]", "x"), url=user.url)
        assert user.asked[0]["messages"][-1]["content"] == "Say ."


@pytest.mark.parametrize(
    ("say", "reason"),
    [
        (lambda messages, number: 500, "the user does not answer: InternalServerError"),
        (lambda messages, number: 400, "the user does not answer: BadRequestError"),
        (lambda messages, number: " \n", "the user says nothing"),
        (lambda messages, number: "<think>What would", "the user says nothing"),
        (lambda messages, number: "Well. [DONE] [GIVE UP]", "the user says that it is done and that it gives up"),
    ],
)
def test_a_user_that_fails_is_a_failure_by_name_and_no_reward(say, reason):
    with User(say) as user, pytest.raises(EpisodeFailed, match=reason):
        play(Assistant("a"), url=user.url, tries=2)


def test_a_user_that_ends_before_the_policy_has_spoken_is_a_failure():
    row = task([{"role": "system", "content": "You book tables."}])
    with User(script("[DONE]")) as user, pytest.raises(EpisodeFailed, match=r"ends the conversation \(done\) before"):
        play(Assistant(), row, user.url)


def test_thoughts_of_a_user_are_not_said():
    policy = Assistant("For when?", "Booked.")
    with User(script("<think>I am hungry.</think> Tonight.", "<think>Good.</think> [DONE]")) as user:
        row, _, _ = play(policy, url=user.url)
    assert policy.talks[1][-1] == {"role": "user", "content": "Tonight."}
    assert row.score == 1.0


def test_a_frozen_role_may_play_the_user():
    policy = Assistant("For when?", "Booked.")
    policy.talk_of_user = ["Tonight.", "[DONE]"]
    row, _, measured = play(policy, role="user")
    assert row.score == 1.0
    first, second = policy.user.talks
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second == [*first, {"role": "assistant", "content": "Tonight."}, {"role": "user", "content": "Booked."}]
    assert first[0]["content"].endswith("You: Hello, a table please.\n\nThe assistant: For when?")
    assert "Book a table for two." in first[0]["content"]
    assert measured["calls"] == 2
    assert "tokens_in" not in measured
    policy = Assistant("For when?")
    policy.talk_of_user = [NoRoom("full")]
    with pytest.raises(EpisodeFailed, match="the user has no room for another message: full"):
        play(policy, role="user")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "it has no column 'user'"),
        ([1], "column 'user' is a list"),
        ({"goals": "x"}, "column 'user' has 'goals'; it may have goal, persona, success"),
        ({"persona": "x"}, "column 'user' has no goal"),
        ({"goal": "x", "persona": 3}, "persona is a text, not a int"),
        ({"goal": "x", "success": "me"}, "success is user, rewards, or an object with contains and matches, not 'me'"),
        ({"goal": "x", "success": {}}, "and is empty"),
        ({"goal": "x", "success": {"equals": "y"}}, "and has 'equals'"),
        ({"goal": "x", "success": {"contains": [3]}}, r"contains is a text or a list of texts, not \[3\]"),
        ({"goal": "x", "success": {"matches": "("}}, "is no regular expression"),
        ({"goal": "x", "success": {"matches": "(" * 5000}}, "is no regular expression"),
    ],
)
def test_a_row_without_a_user_is_a_bad_row(value, problem):
    row = Task("q", metadata={} if value is None else {"user": value})
    with pytest.raises(ValueError, match=problem):
        profile_of(row, "user", "user")
    agent = UserSimulator(UserSimulator.Options(role="user"))
    assert list(agent.check_labels([task(), row, Task("q", metadata={"user": "A goal."})])) == [1]


def test_a_row_with_tools_is_a_bad_row():
    with pytest.raises(ValueError, match="it has tools, and user_simulator runs none"):
        profile_of(Task("q", metadata={"user": "x"}, tools=[{"type": "function"}]), "user", "user")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"role": "user", "base_url": "http://x/v1"}, "role user plays the user, and base_url is of a server"),
        ({"role": "user", "price_in": 1.0}, "price_in is of a server"),
        ({"model": "m", "done": "[END]", "give_up": "[END] [LOST]"}, "cannot be told apart"),
        ({}, r"name the user with --agent.model, or serve one beside the run, --agent.serve, or .* --agent.role user$"),
        ({"model": "m", "instructions": "no/such.txt"}, "the instructions no/such.txt: No such file or directory"),
        (
            {"model": "m", "instructions": __file__},
            r"have no \{goal\}; it may have \{goal\}, \{persona\}, \{done\}, \{give_up\}",
        ),
        ({"model": "m", "serve": "n", "base_url": "http://x/v1"}, "serve starts a server, and base_url names another"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options, message):
    with pytest.raises((ValueError, UserError), match=message):
        UserSimulator(UserSimulator.Options(**options))


def sums(messages, number):
    """A user who wants a sum, and asks again until it is right."""
    goal = messages[0]["content"].partition("What the user wants:\n")[2].splitlines()[0]
    right = str(sum(map(int, goal.rstrip("=").split("+"))))
    return "[DONE]" if messages[-1]["content"].strip() == right else goal


def test_a_run_trains_on_the_policys_tokens_alone(tmp_path):
    pytest.importorskip("rlhf_plugin_rloo")
    data = tmp_path / "sums.jsonl"
    rows = [{"prompt": goal, "user": goal} for goal in ("17+35=", "4+4=", "41+29=")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with User(sums) as user:
        flags = ["--algo", "rloo", "--agent", "user_simulator", "--agent.model", "m", "--agent.base-url", user.url]
        flags += ["--agent.max-turns", "2", "--agent.price-in", "3", "--data", str(data), "--actor.model", "quickstart"]
        flags += ["--batch-size", "3", "--n", "4", "--max-new-tokens", "4", "--steps", "2", "--train.threads", "1"]
        run = tmp_path / "run"
        command = [sys.executable, "-m", "rlhf_host.cli.main", "train", *flags, "--run-dir", str(run)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for step in metrics[-2:]:
        assert step["user_simulator/calls"] + step["user_simulator/cached"] == step["user/turns"] * 12
        assert step["user_simulator/cost"] == pytest.approx(step["user_simulator/tokens_in"] * 3 / 1e6)
        assert step["user/done"] + step["user/unfinished"] == pytest.approx(1)
        assert step["mismatch/max"] < 1e-3
    assert metrics[-1]["reward/mean"] == metrics[-1]["user/done"]
    assert len(list((run / "user_messages").iterdir())) == 1


def test_a_user_that_is_always_lost_ends_the_run_by_its_name(tmp_path):
    pytest.importorskip("rlhf_plugin_rloo")
    with User(lambda messages, number: 500) as user, pytest.raises(rlhf_host.RunError, match="the user does not answer"):
        rlhf_host.train(
            algo="rloo",
            agent="user_simulator",
            data=[{"prompt": "4+4=", "user": "4+4="}],
            run_dir=str(tmp_path / "run"),
            **{"actor.model": "quickstart", "agent.model": "m", "agent.base_url": user.url, "agent.tries": 1},
            **{"train.steps": 1, "train.batch_size": 1, "rollout.n": 2, "rollout.max_new_tokens": 2, "train.threads": 1},
        )


def chat_model(directory):
    """A random model that reads and writes any text."""
    tokenizer = byte_tokenizer(TOOLS_TEMPLATE)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=2048, **sizes, **ids)).save_pretrained(
        directory
    )
    tokenizer.save_pretrained(directory)
    return str(directory)


def test_a_frozen_role_of_a_run_plays_the_user(tmp_path):
    pytest.importorskip("rlhf_plugin_rloo")
    row = {"prompt": [{"role": "system", "content": "Help."}], "user": {"goal": "Help.", "success": {"matches": "[aeiou]"}}}
    rlhf_host.train(
        algo="rloo",
        agent="user_simulator",
        data=[row],
        run_dir=str(tmp_path / "run"),
        **{"actor.model": chat_model(tmp_path / "model"), "agent.role": "user", "agent.max_turns": 2, "agent.max_tokens": 4},
        **{"train.steps": 1, "train.batch_size": 1, "rollout.n": 4, "rollout.max_new_tokens": 8, "train.threads": 1},
        **{"trajectories.every": 1},
    )
    [step] = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()][-1:]
    assert step["user_simulator/calls"] == 4 * (1 + step["user/turns"])
    assert step["user/turns"] == 2
    [file] = (tmp_path / "run/trajectories").iterdir()
    for line in map(json.loads, file.read_text().splitlines()):
        calls = [event.get("role") for event in line["events"] if event["kind"] == "call"]
        assert calls == ["user", None, "user", None, "user"]
