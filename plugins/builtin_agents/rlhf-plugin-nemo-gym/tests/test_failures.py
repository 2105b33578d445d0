"""Failures of an environment, and what each becomes. None is a reward of 0."""

from __future__ import annotations

import pytest
from rlhf_plugin_nemo_gym.rows import PARAMS

from rlhf_host import EpisodeFailed, RunError, Task, UserError

from .conftest import call, row


def calculates(seen):
    """A policy that calls the tool, and reads its result."""
    return "it is " + seen.rpartition('{"sum": ')[2].partition("}")[0] if "tool_response" in seen else call(2, 3)


def kinds(trajectory):
    return "".join(segment.kind[0] for segment in trajectory.segments)


def test_an_episode_is_the_policy_s_own_tokens_and_the_environment_s_reward(play):
    right, wrong, text = play([row(), row(2, 4), row(tools=False, agent_ref={"name": "calculator"})], calculates)
    for [final], reward in ((right, 1.0), (wrong, 0.0)):
        assert kinds(final) == "paoa"
        assert final.decode(final.segments[2].token_ids).startswith('user\n<tool_response>\n{"sum": 5}\n')
        assert (final.agent_rewards, final.score, final.finish_reason) == ([None, reward], reward, "stop")
        assert final.metrics == {"nemo_gym/accuracy": reward, "nemo_gym/turns": 1.0}
        events = {event["kind"]: event for event in final.events}
        assert (events["tool"]["name"], events["tool"]["result"]) == ("add", '{"sum": 5}')
        assert events["nemo_gym"]["reward"] == reward
    assert (kinds(text[0]), text[0].agent_rewards) == ("pa", [0.0]), "without tools a call is text"


def test_a_mistake_of_the_policy_is_a_result_like_any(play):
    def mistaken(seen):
        return "I give up" if "tool_response" in seen else call("x", 3)

    [[final]] = play([row()], mistaken)
    assert "a and b are integers" in final.decode(final.segments[2].token_ids)
    assert final.agent_rewards == [None, 0.0]


FAILURES = {
    # fault: whether another attempt is made, reason
    "seed_500": (True, "/run answered 500"),
    "verify_500": (True, r"/run answered 500: .*KeyError\('expected'\)"),
    "429": (True, "/run answered 429: .*not today"),
    "422": (False, "/run answered 422: .*not today"),
    "reset": (True, "/run cannot be reached: ServerDisconnectedError"),
    "slow": (True, r"no answer of /run in 1\.5 s"),
    "not_json": (True, "something else than a JSON object"),
    "no_calls": (False, "the environment never asked the policy"),
    "drops_metadata": (True, "/run answered 500: .*names no episode: use an episode's base URL, or metadata.rlhf_episode"),
    "wrong_tokens": (False, "gym_tokens: 2 of 2 answers in the environment's response are not the tokens"),
    "hidden": (True, r"gym_tokens: 2 of 4 answers of the policy are not in the environment's response"),
}


def test_the_matrix_of_failures(play):
    """All at once, on the same servers. The episode that nothing befalls is not disturbed."""
    for faults, options in (([fault for fault in FAILURES if fault != "slow"], {}), (["slow"], {"run_timeout_s": 1.5})):
        rows = [row(fault=fault) for fault in [*faults, None]]
        *failures, fine = play(rows, calculates, retries=1, **options)
        for fault, failure in zip(faults, failures, strict=True):
            retryable, reason = FAILURES[fault]
            assert isinstance(failure, EpisodeFailed), (fault, failure)
            with pytest.raises(EpisodeFailed, match=reason):
                raise failure
            assert failure.retryable == retryable, fault
        assert fine[0].agent_rewards == [None, 1.0]


def test_hidden_calls_may_train(play):
    [rows] = play([row(fault="hidden")], calculates, hidden_calls="train")
    assert sum(len(one.actions) for one in rows) == 4
    assert [one.agent_rewards[-1:] for one in rows if one.final] == [[1.0]]


def test_without_token_ids_in_the_response_the_policy_s_log_is_what_counts(play):
    [[final]] = play([row(fault="no_ids")], calculates)
    assert final.agent_rewards == [None, 1.0]


@pytest.mark.parametrize(("fault", "shown"), [("no_reward", "null"), ("nan", "NaN")])
def test_a_reward_that_is_none_leaves_the_episode_unjudged(play, fault, shown):
    [[final]] = play([row(fault=fault)], calculates)
    assert final.unjudged_reason == f"nemo_gym: the environment's reward is {shown}"
    assert (final.agent_rewards, final.score) == ([], None)


def test_a_conversation_that_is_full_is_cut_and_unjudged(play):
    """Gym answers with a reward of 0 for it."""
    [[final]] = play([row()], calculates, max_tokens=300)
    assert kinds(final) == "pa"
    assert (final.unjudged_reason, final.finish_reason) == (
        "nemo_gym: rollout.max_tokens is full, so the environment could not go on",
        "length",
    )
    assert final.agent_rewards == []
    [failure] = play([row()], calculates, max_tokens=100)
    assert failure.reason == "the prompt leaves no room: rollout.max_tokens is full"


def test_an_answer_that_is_cut_is_the_policy_s_own(play):
    [[final]] = play([row()], calculates, max_new_tokens=4)
    assert (kinds(final), final.finish_reason, final.agent_rewards) == ("pa", "length", [0.0])


def test_when_the_engine_is_lost_nobody_waits_for_gym(play):
    """Gym asks again for ever."""
    [failure] = play([row()], calculates, engine_fails=RunError("the engine is gone"))
    assert isinstance(failure, RunError)
    assert "the engine is gone" in str(failure)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"agent_ref": {"name": "teacher"}}, "there is no agent 'teacher'; Gym's servers have calculator"),
        ({PARAMS: None}, "is no row of NeMo Gym: give --data nemo_gym"),
    ],
)
def test_rows_that_cannot_be_played_end_the_run(play, change, reason):
    one = Task("1+1?", metadata=row() | change)
    [failure] = play([one], calculates)
    assert isinstance(failure.__cause__, UserError)
    assert reason in str(failure)
