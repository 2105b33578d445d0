"""Programs that play episodes: the policy by OpenAI's API, commands in a sandbox, tests for the reward."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import pytest
from rlhf_authoring import ScriptedEngine
from rlhf_authoring.models import TOOLS_TEMPLATE, byte_tokenizer
from rlhf_plugin_shell import HarnessAgent
from rlhf_plugin_shell.sandboxes import SandboxFailed

from rlhf_host import Episode, EpisodeFailed, Sampling, Task, UserError
from rlhf_host.installed import find
from rlhf_host.internals import Episodes, EpisodeSettings, Gate, Loaded, PluginManager, SampledModel
from rlhf_host.settings import RolloutConfig

pytest.importorskip("rlhf_plugin_openai_agent", reason="needs rlhf-plugin-shell[harness]")
Endpoints = pytest.importorskip("rlhf_server.endpoints").Endpoints
PROGRAMS = Path(__file__).parent / "programs.py"


def play(prompt, says, *, change=None, timeout_s=600.0, columns=None, program=PROGRAMS, **options):
    """The row and the events of an episode. ``says`` are the policy's answers."""
    command = ["{python}", str(program), "{task_file}"]
    agent = HarnessAgent(HarnessAgent.Options(**{"command": command, **options}))
    if change is not None:
        change(agent)
    tokenizer = byte_tokenizer(TOOLS_TEMPLATE)
    answers = iter(says)

    def script(ids, key):
        return [*tokenizer.encode(next(answers), add_special_tokens=False), tokenizer.eos_token_id]

    async def main():
        manager = PluginManager([Loaded("agent", "harness", find("agent", "harness"), agent)])
        model = SampledModel(engine=Gate(ScriptedEngine(script)), tokenizer=tokenizer)
        rollout = RolloutConfig(episode_retries=0, episode_timeout_s=timeout_s)
        settings = EpisodeSettings(sampling=Sampling(max_new_tokens=500), max_tokens=4000, rollout=rollout)
        episode = Episode("e", "g", Task(prompt, None, {"tests": "test -e x", **(columns or {})}))
        server = Endpoints()
        episodes = Episodes(manager, model, settings, endpoints=server)
        try:
            rows = await episodes.play(episode)
            return rows[-1], episode.events, tokenizer
        finally:
            await server.close()
            await agent.sandboxes.close()
            manager.close()

    return asyncio.run(main())


@pytest.mark.parametrize(("says", "reward"), [("touch x", 1.0), ("touch y", 0.0)])
def test_a_program_s_commands_run_in_the_sandbox_and_tests_give_the_reward(says, reward):
    row, _, tokenizer = play("one command", [says])
    assert row.agent_rewards == [reward]
    assert row.metrics == {
        "shell/calls": 1.0,
        "shell/commands": 1.0,
        "shell/failed": 0.0,
        "shell/late": 0.0,
        "shell/tests_ended": 0.0,
        "shell/tests_unread": 0.0,
    }
    [action] = row.actions
    assert tokenizer.decode(action.token_ids) == f"{says}<|im_end|>", "tokens that train are those that were sampled"
    assert len(action.logprobs) == len(action.token_ids)
    assert not Path("x").exists()
    assert not Path("y").exists()


def test_what_a_program_is_told():
    os.environ["SECRET_TOKEN"] = "xyzzy"
    try:
        _, events, _ = play("says what it sees", ["a"], columns={"files": {"a": "1"}, "kind": "k"})
    finally:
        del os.environ["SECRET_TOKEN"]
    [program] = [each for each in events if each["kind"] == "program"]
    seen = json.loads(program["stdout"].splitlines()[-1])
    told = seen["told"]
    assert told[0] == {"returncode": 3, "output": "\n"}
    assert told[1] == {"returncode": 0, "output": "1\n"}
    assert told[2] == {"returncode": -1, "output": "", "ended": "it took longer than 0.5 s"}
    assert all('give {"command": TEXT, "timeout": SECONDS}, in one line' in each["error"] for each in told[3:6])
    assert "no zero byte" in told[6]["error"]
    assert told[7]["ended"] == "it wrote too much"
    assert told[8] == {"returncode": 0, "output": "alive\n"}
    assert seen["metadata"] == {"kind": "k"}, "neither tests nor files"
    assert "SECRET_TOKEN" not in seen["env"]
    assert {"OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "RLHF_SHELL", "HOME"} <= set(seen["env"])


@pytest.mark.parametrize(
    ("prompt", "says", "reason"),
    [
        ("asks nothing", [], "the program never asked the policy"),
        ("falls", ["a"], "the program ended with exit code 1: on its nose"),
        ("hangs", ["a"], "no answer of agent_run in 4 s"),
    ],
)
def test_a_program_that_fails_is_no_zero(prompt, says, reason):
    with pytest.raises(EpisodeFailed, match=reason):
        play(prompt, says, timeout_s=4.0)


def test_a_command_that_goes_on_after_its_program_ends_before_the_tests():
    began = time.monotonic()
    row, _, _ = play("leaves a command", ["a"], columns={"tests": "test -e late"})
    assert row.agent_rewards == [1.0]
    assert time.monotonic() - began < 20


def test_a_line_without_end_is_refused():
    row, events, _ = play("a line without end", ["a"])
    assert row.agent_rewards == [0.0]
    assert "a line has at most 1048576 bytes" in json.dumps([dict(each) for each in events])


def test_a_sandbox_that_fails_ends_program_and_episode():
    def change(agent):
        open_one = agent.sandboxes.open

        async def opened(work):
            shell = await open_one(work)

            async def run(*_, **__):
                raise SandboxFailed("gone")

            shell.run = run
            return shell

        agent.sandboxes.open = opened

    with pytest.raises(EpisodeFailed, match="the shell: gone") as told:
        play("one command", ["touch x"], change=change)
    assert told.value.retryable


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(UserError, match=r"agent\.command '\"a': No closing quotation"):
        HarnessAgent(HarnessAgent.Options(command='"a'))
    with pytest.raises(UserError, match=r"agent\.command is empty"):
        HarnessAgent(HarnessAgent.Options(command=" "))
    with pytest.raises(ValueError, match="max_turns"):
        HarnessAgent.Options(command="a", max_turns=3)
    with pytest.raises(UserError, match=r"agent\.command: /nowhere/program cannot be started"):
        play("one command", [], command="/nowhere/program")


def test_a_missing_package_names_what_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"programs need another package: .*rlhf-plugin-openai-agent"):
        HarnessAgent(HarnessAgent.Options(command=f"{sys.executable} x"))
