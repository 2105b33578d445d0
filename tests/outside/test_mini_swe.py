"""The real mini-swe-agent plays tasks of the agent harness. ``make test-mini-swe`` sets it up."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from rlhf_authoring import ScriptedEngine
from rlhf_authoring.models import TOOLS_TEMPLATE, byte_tokenizer
from rlhf_plugin_shell import HarnessAgent
from rlhf_plugin_shell.fixes_model import DONE, SETTINGS, command, tasks
from rlhf_server.endpoints import Endpoints
from ruamel.yaml import YAML

from rlhf_host import Episode, Sampling, Task
from rlhf_host.installed import find
from rlhf_host.internals import Episodes, EpisodeSettings, Gate, Loaded, PluginManager, SampledModel
from rlhf_host.settings import RolloutConfig

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build/mini-swe/bin/python"
PROGRAM = ROOT / "examples/recipes/mini_swe.py"
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="needs mini-swe-agent: make test-mini-swe"),
    pytest.mark.timeout(300),
]
ROW = next(row for row in tasks() if "mul.py" in row["files"] and "a + b" in row["files"]["mul.py"])


@pytest.fixture
def play(tmp_path):
    """Plays an episode with a policy that says what a test says. Returns its rows, its events and the tokenizer."""
    settings = tmp_path / "mini_swe.yaml"
    YAML().dump(SETTINGS, settings)

    def run(says, *specs, max_tokens=8000):
        agent = HarnessAgent(
            HarnessAgent.Options(command=[str(PYTHON), str(PROGRAM), "{task_file}", *(specs or [str(settings)])], timeout_s=30)
        )
        tokenizer, answers = byte_tokenizer(TOOLS_TEMPLATE), iter(says)

        def script(ids, key):
            return [*tokenizer.encode(next(answers), add_special_tokens=False), tokenizer.eos_token_id]

        async def main():
            manager = PluginManager([Loaded("agent", "harness", find("agent", "harness"), agent)])
            model = SampledModel(engine=Gate(ScriptedEngine(script)), tokenizer=tokenizer)
            rollout = RolloutConfig(episode_retries=0, episode_timeout_s=100)
            limits = EpisodeSettings(sampling=Sampling(max_new_tokens=500), max_tokens=max_tokens, rollout=rollout)
            episode, server = (
                Episode("e", "g", Task(ROW["prompt"], None, {name: ROW[name] for name in ("files", "tests")})),
                Endpoints(),
            )
            try:
                return await Episodes(manager, model, limits, endpoints=server).play(episode), episode.events, tokenizer
            finally:
                await server.close()
                await agent.sandboxes.close()
                manager.close()

        return asyncio.run(main())

    return run


def test_its_loop_repairs_a_function_and_each_answer_trains_with_the_tokens_that_were_sampled(play):
    says = [command("cat mul.py"), command("sed -i 's/+/*/' mul.py"), command(DONE)]
    [row], events, tokenizer = play(says)
    assert row.agent_rewards == [None, None, 1.0]
    assert [tokenizer.decode(action.token_ids) for action in row.actions] == [f"{each}<|im_end|>" for each in says]
    text = tokenizer.decode([token for segment in row.segments for token in segment.token_ids])
    assert "0\ndef mul(a, b):\n    return a + b" in text, "the observation, in the form of the settings"
    assert row.metrics["shell/commands"] == row.metrics["shell/calls"] == 3.0
    assert '"Submitted"' in next(event for event in events if event["kind"] == "program")["stdout"]


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ([command("sed -i 's/+/-/' mul.py"), command(DONE)], "Submitted"),
        (["no command"] * 3, "RepeatedFormatError"),
        ([command("ls")] * 4, "LimitsExceeded"),
    ],
)
def test_a_bad_episode_is_a_zero_and_no_failure(play, says, why):
    rows, events, _ = play(says)
    assert rows[-1].agent_rewards[-1] == 0.0
    assert why in next(event for event in events if event["kind"] == "program")["stdout"]


def test_a_context_that_is_full_ends_the_episode_and_the_tests_judge(play):
    says = [command("sed -i 's/+/*/' mul.py"), command("head -c 3000 /dev/zero | tr '\\0' x"), command(DONE)]
    rows, _, _ = play(says, max_tokens=1500)
    assert rows[-1].agent_rewards[-1] == 1.0


@pytest.mark.parametrize(
    ("kind", "config"), [("litellm", "mini"), ("openrouter", "mini"), ("litellm_textbased", "mini_textbased")]
)
def test_its_own_prompts_with_each_model_class(play, kind, config):
    def said(text):
        if kind.endswith("textbased"):
            return f"THOUGHT: so.\n\n{command(text)}"
        return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': text}})}\n</tool_call>"

    says = [said("cat mul.py"), said("sed -i 's/+/*/' mul.py"), said(DONE)]
    [row], events, tokenizer = play(says, config, f"model.model_class={kind}", max_tokens=20_000)
    assert row.agent_rewards == [None, None, 1.0]
    assert [tokenizer.decode(action.token_ids) for action in row.actions] == [f"{each}<|im_end|>" for each in says]
    assert '"Submitted"' in next(event for event in events if event["kind"] == "program")["stdout"]
