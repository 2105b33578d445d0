"""Environments from files: each form as its own trainer plays it."""

import asyncio
import sys
from pathlib import Path

import pytest
from rlhf_plugin_multi_turn import FileAgent

import rlhf_host
from rlhf_host import Action, Episode, Reply, RunError, Task, ToolCall, UserError

FILE = str(Path(__file__).parent / "environments.py")
SUMS = [{"prompt": "12+34=", "label": "46", "start": 1}, {"prompt": "5+6=", "label": "11", "start": 2}]


@pytest.fixture
def play():
    """The trajectories of two tasks' episodes on the quickstart model."""

    def run(name, data=SUMS, **settings):
        settings = {"rollout.n": 2, "train.batch_size": 2, "rollout.max_new_tokens": 8, "train.threads": 1} | settings
        with rlhf_host.session(agent=f"{FILE}:{name}", model="quickstart", data=data, **settings) as running:
            return running.sample(1, settings["train.batch_size"]).trajectories_in_order()

    return run


# --- TRL -------------------------------------------------------------------------------------------


def turn(made, episode, *calls):
    reply = Reply("", tool_calls=tuple(ToolCall(name, arguments, f"id{n}") for n, (name, arguments) in enumerate(calls)))
    return made.agent_step(episode, Action("", [1], "stop", parse=lambda: reply))


def test_an_environment_of_trl_has_its_methods_as_tools():
    made = FileAgent(FileAgent.Options(path=FILE, function="Counter", tool_format="native"))
    episode = Episode("e", "g", Task([{"role": "user", "content": "Count to 3"}], "3", {"start": 1, "level": 2}))

    async def run():
        first = await made.agent_reset(episode)
        assert [tool["function"]["name"] for tool in first.tools] == ["increment"]
        assert first.observation == [{"role": "user", "content": "Count to 31+1="}]
        seen = await turn(made, episode, ("increment", {"step": 2}), ("reset", {}))
        assert [message["content"][:20] for message in seen.observation] == ["3", "Error: there is no t"]
        last = await turn(made, episode)
        assert (last.done, last.reward) == (True, 1.0)
        assert episode.state.environment.columns["level"] == 2
        await made.agent_close(episode)

    asyncio.run(run())
    assert made.needs().rewards is False
    assert len(sys.modules[type(episode.state.environment).__module__].OPEN) == 1, "the one that showed the tools"


def test_each_episode_has_an_environment_of_its_own(play):
    rows = play("Counter")
    assert [row.reward for row in rows] == [0.0] * 4
    assert {row.prompt_text.strip() for row in rows} == {"12+34=1+1=", "5+6=2+1="}


def test_an_environment_without_a_reward_is_judged_by_plugins(play):
    pytest.importorskip("rlhf_plugin_math_verifier", reason="a whole run needs a reward")
    rows = play("Judged", rewards="math_verifier")
    assert {row.reward for row in rows} <= {0.0, 1.0}


# --- OpenRLHF ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AgentInstance", "AgentExecutor", "Late", "LateExecutor"])
def test_an_instance_of_openrlhf_steps_until_it_is_done(play, name):
    rows = play(name)
    assert {len(row.actions) for row in rows} <= {1, 2, 3}
    assert len({len(row.actions) for row in rows}) > 1 or rows[0].reward == 1.0
    for row in rows:
        assert row.reward == row.score == float(row.task.ground_truth in row.decode(row.actions[-1].token_ids))
        assert row.metrics["turns"] == len(row.actions)
        assert all(len(part.token_ids) <= 4 for part in row.actions[1:]), "what it said of max_tokens"
        seen = [row.decode(part.token_ids) for part in row.completion if part.kind == "observation"]
        assert seen == [" - " + row.task.prompt] * (len(row.actions) - 1)


def test_an_executor_of_openrlhf_is_the_file_s_default():
    before = set(sys.modules)
    made = FileAgent(FileAgent.Options(path=FILE))
    assert made.instance.__name__ == "AgentInstance"
    assert "openrlhf" not in set(sys.modules) - before


def test_an_execute_of_its_own_has_the_policy_as_its_engine(play):
    rows = play("Own")
    assert all(len(row.actions[0].token_ids) <= 5 for row in rows)
    assert [row.reward for row in rows] == [float(row.task.ground_truth in row.text) for row in rows]


def test_an_executor_that_is_made_with_its_engine_plays_as_an_instance_does(play):
    """Up to OpenRLHF 0.9.2; the reward is the sum at the end, and the same answers are sampled."""
    rows, same = play("Older"), play("Patient")
    assert [
        [part.token_ids for part in row.completion][: len(other.completion)] for row, other in zip(rows, same, strict=True)
    ] == [[part.token_ids for part in other.completion] for other in same]
    assert [row.reward for row in rows] == [row.reward for row in same]
    assert [row.score for row in rows] == [row.score for row in same]
    assert all(row.metrics["turns"] == len(row.actions) for row in rows)


def test_an_older_execute_of_its_own_puts_its_result_into_the_queue(play):
    for row in play("OlderOwn", **{"rollout.max_tokens": 40}):
        assert row.reward == 0.5
        assert row.score == 0.25
        assert row.metrics["room"] == 40
        assert len(row.actions) == 2
        assert all(len(part.token_ids) <= 3 for part in row.actions)


def test_an_older_execute_without_a_result_fails_its_episode(play):
    with pytest.raises(RunError, match="execute put 0 results into result_queue: one is needed for each episode"):
        play("Silent")


def test_tokens_that_nobody_sampled_are_no_rollout(play):
    with pytest.raises(RunError, match="observation_tokens are not what the policy saw and sampled"):
        play("Spoiled")


# --- of one's own -----------------------------------------------------------------------------------


def test_a_function_and_hooks(play):
    assert [row.reward for row in play("play")] == [float(len(row.actions[0].token_ids)) for row in play("play")]
    assert [row.reward for row in play("Hooks")] == [0.25] * 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("talk", r"--agent openai_agent --agent.function environments.py:talk"),
        ("Nothing", r"Nothing is no environment; one is a class with reset.*AgentExecutor \(OpenRLHF\).*hookimpl"),
        ("Missing", "has no 'Missing'; it has Counter"),
        ("Stranger", "Stranger needs server when it is made; OpenRLHF gives max_steps, max_length"),
        ("Deaf", "Deaf does not take max_length, llm_engine, hf_tokenizer, result_queue"),
    ],
)
def test_what_is_no_environment(name, message):
    with pytest.raises(UserError, match=message):
        FileAgent(FileAgent.Options(path=FILE, function=name))


def test_a_file_with_several_asks_which(tmp_path):
    (tmp_path / "two.py").write_text("class A:\n    def reset(self): pass\nclass B(A): pass\n")
    with pytest.raises(UserError, match=r"defines A, B: say which one plays, as in two\.py:A"):
        FileAgent(FileAgent.Options(path=str(tmp_path / "two.py")))


def test_two_steps_of_training_and_a_file_that_changed(tmp_path, caplog):
    pytest.importorskip("rlhf_plugin_rloo", reason="a whole run needs an algorithm")
    path = tmp_path / "game.py"
    path.write_text(Path(FILE).read_text())
    settings = {"rollout.n": 4, "train.batch_size": 2, "train.steps": 1, "train.threads": 1, "rollout.max_new_tokens": 8}
    run = rlhf_host.train(
        algo="rloo", agent=f"{path}:play", model="quickstart", data=SUMS, run_dir=str(tmp_path / "run"), **settings
    )
    assert not [record for record in caplog.records if "has changed" in record.message]
    path.write_text(path.read_text().replace("float(len(", "-float(len("))
    rlhf_host.train(resume=run.run_dir, data=SUMS, **{"train.steps": 2})
    assert [record for record in caplog.records if "game.py has changed since the run began" in record.message]
