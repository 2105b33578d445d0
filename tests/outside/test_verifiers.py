"""Environments of the real ``verifiers``, in its own Python environment. ``make test-verifiers`` sets it up."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
import torch
from rlhf_authoring import ScriptedEngine
from rlhf_authoring.models import TOOLS_TEMPLATE as QWEN
from rlhf_plugin_verifiers import Verifiers, VerifiersTasks
from safetensors.torch import load_file

from rlhf_host import Episode, EpisodeFailed, Sampling, UserError
from rlhf_host.config.schema import RolloutConfig
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.plugins.selection import find
from rlhf_host.rollouts.endpoints import Endpoints
from rlhf_host.rollouts.episode_settings import EpisodeSettings, SampledModel
from rlhf_host.rollouts.episodes import Episodes
from rlhf_host.rollouts.gate import Gate
from tests.chat_models import save_chat_model
from tests.data.conftest import byte_tokenizer

PYTHON = Path(__file__).parents[2] / "build/verifiers/bin/python"
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="needs verifiers: make test-verifiers"),
    pytest.mark.timeout(300),
]

SUMS = '''
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: int

class Calculator(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

class SumTaskConfig(vf.TaskConfig):
    fault: str = ""
    tools: bool = False

class Sum(vf.Task[SumData, vf.State, SumTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())] if config.tools else []

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.config.fault == "raises":
            raise KeyError("answer")
        if self.config.fault == "late":
            import asyncio
            await asyncio.sleep(30)
        return float("nan") if self.config.fault == "nan" else float(str(self.data.answer) in trace.last_reply)

    @vf.reward(weight=0.1)
    async def digits(self, trace: vf.Trace) -> float:
        return sum(letter.isdigit() for letter in trace.last_reply) / max(1, len(trace.last_reply))

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

class SumConfig(vf.TasksetConfig):
    task: SumTaskConfig = SumTaskConfig()
    most: int = 4

class Sums(vf.Taskset[Sum, SumConfig]):
    def load(self):
        print("loading")  # is no answer of the worker
        for a in range(self.config.most):
            for b in range(self.config.most):
                yield Sum(SumData(prompt=f"{a}+{b}=", answer=a + b), self.config.task)

__all__ = ["Sums"]

if __name__ == "__main__":
    Calculator.run()
'''

ECHO = """
import itertools
import verifiers.v1 as vf

class Echo(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    pass

class Echoes(vf.Taskset[Echo, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield Echo(vf.TaskData(prompt=f"say {number}", system_prompt="Answer."), self.config.task)

class EchoConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=8)
    turns: int = 3

class EchoEnv(vf.Env[EchoConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            for _ in range(self.config.turns - 1):
                if segment.terminated:
                    break
                segment = await talk.turn(f"again, after {len(segment.last_reply)} letters")
        talk.trace.record_reward("vowels", sum(letter in "aeiou" for letter in talk.trace.last_reply) / 6)

__all__ = ["Echoes", "EchoEnv"]
"""


@pytest.fixture
def files(tmp_path):
    for name, text in (("sums", SUMS), ("echoes", ECHO)):
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def train(rlhf, folder, name, model, *more):
    file, run = folder / f"{name}.py", folder / "run"
    rlhf.run(
        *("train", "--algo", "rloo", "--actor.model", model, "--actor.lr", "1e-3", "--run-dir", run, "--train.threads", "2"),
        *("--agent", "verifiers", "--agent.environment", file, "--agent.python", PYTHON),
        *("--data", "verifiers", "--data.verifiers.environment", file, "--data.verifiers.python", PYTHON),
        *("--rollout.n", "4", "--train.batch-size", "2", "--train.steps", "3", "--trajectories.every", "1"),
        *("--trajectories.tokens", *more),
    )
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/failed"] for row in steps] == [0.0] * 3, (run / "verifiers.log").read_text()
    assert max(row["mismatch/max"] for row in steps) < 1e-4
    said = [json.loads(line) for file in sorted((run / "trajectories").iterdir()) for line in file.read_text().splitlines()]
    return steps, [row for row in said if row.get("split", "train") == "train"]


def moved(before, after):
    old, new = (load_file(folder / "model.safetensors") for folder in (before, after))
    return any(not torch.equal(tensor, new[name]) for name, tensor in old.items())


def test_a_taskset_trains(rlhf, files):
    model = save_chat_model(files / "model", hidden=64)
    steps, said = train(rlhf, files, "sums", model, "--data.verifiers.size", "8", "--rollout.max-new-tokens", "6")
    assert len(said) == 24
    assert all(0.0 <= row["reward"] <= 1.1 for row in said)
    assert all("+" in row["prompt"] for row in said)
    assert {"verifiers/right", "verifiers/digits", "verifiers/letters", "verifiers/turns"} <= steps[-1].keys()
    assert moved(model, files / "run/model")


def test_an_environment_of_several_turns_trains(rlhf, files):
    model = save_chat_model(files / "model", hidden=64)
    steps, said = train(
        *(rlhf, files, "echoes", model, "--data.verifiers.size", "4", "--rollout.max-new-tokens", "6"),
        *("--agent.args", '{"turns": 2}'),
    )
    assert len(said) == 24
    assert {"".join(segment["kind"][0] for segment in row["segments"]) for row in said} == {"paoa"}, "contiguous: one row"
    assert {row["verifiers/turns"] for row in steps} == {2.0}
    assert any(row["reward"] > 0 for row in said)
    assert moved(model, files / "run/model")


@pytest.fixture
def play(files):
    """Episodes of the first tasks with a policy that says what a test says: trajectories, or the exception."""

    def run(say, name="sums", count=1, max_tokens=4000, **options):
        options = {"environment": str(files / f"{name}.py"), "python": str(PYTHON), "timeout_s": 60} | options
        agent, source = Verifiers(Verifiers.Options(**options)), {k: options[k] for k in ("environment", "python")}
        tasks = VerifiersTasks(VerifiersTasks.Options(**source, size=count)).load_tasks("train", 0)
        tokenizer = byte_tokenizer(QWEN)

        def script(ids, key):
            return [*tokenizer.encode(say(tokenizer.decode(ids)), add_special_tokens=False), tokenizer.eos_token_id]

        async def main():
            endpoints = Endpoints()
            manager = PluginManager([Loaded("agent", "verifiers", find("agent", "verifiers"), agent)])
            rollout = RolloutConfig(episode_retries=0, episode_timeout_s=100)
            model = SampledModel(engine=Gate(ScriptedEngine(script)), tokenizer=tokenizer)
            settings = EpisodeSettings(sampling=Sampling(max_new_tokens=200), max_tokens=max_tokens, rollout=rollout)
            episodes = Episodes(manager, model, settings, endpoints)
            try:
                playing = [episodes.play(Episode(f"e{n}", "g", task, sample=n)) for n, task in enumerate(tasks)]
                return await asyncio.gather(*playing, return_exceptions=True)
            finally:
                await agent.run_finished(None)
                await endpoints.close()
                manager.close()

        return asyncio.run(asyncio.wait_for(main(), 120))

    return run


def test_tools_are_called(play):
    def calculates(seen):
        if "tool_response" in seen:
            return "it is " + seen.rpartition("<tool_response>")[2].partition("</tool_response>")[0].strip()
        name = re.search(r'"name": "(\w*add)"', seen)[1]
        return f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": 0, "b": 0}}}}\n</tool_call>'

    [[row]] = play(calculates, args='{"taskset": {"task": {"tools": true}}}')
    assert "".join(segment.kind[0] for segment in row.segments) == "paoa"
    assert "0" in row.last_text
    assert row.agent_rewards[0] is None
    assert 1.0 < row.agent_rewards[1] < 1.1


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("raises", r"TaskError: .*KeyError: 'answer'"), ("late", "deadline of the environment's own: scoring")],
)
def test_an_environment_that_fails_is_no_zero(play, fault, reason):
    args = {"taskset": {"task": {"fault": fault}}, "agent": {"timeout": {"scoring": 2}}}
    [failure] = play(lambda seen: "0", args=json.dumps(args))
    with pytest.raises(EpisodeFailed, match=reason):
        raise failure


def test_a_reward_that_is_no_number_is_unjudged(play):
    [[row]] = play(lambda seen: "0", args='{"taskset": {"task": {"fault": "nan"}}}')
    assert (row.unjudged_reason, row.agent_rewards) == ("verifiers: the environment's reward right is nan", [])


def test_a_full_conversation_is_what_the_environment_makes_of_it(play):
    [[row]] = play(lambda seen: "a" * 60, name="echoes", max_tokens=200)
    assert row.finish_reason == "length"
    assert len(row.actions) < 3
    assert row.agent_rewards[-1] == 10.0
    [failure] = play(lambda seen: "a", name="echoes", max_tokens=30)
    assert failure.reason == "the prompt leaves no room: rollout.max_tokens is full"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"environment": "no-such"}, r"environment no-such: ModuleNotFoundError: taskset 'no-such' not found"),
        ({"args": '{"taskset": {"mots": 4}}'}, "mots"),
        (
            {"args": '{"agent": {"harness": {"id": "bash"}}}'},
            "the harness bash of 'agent' runs what the policy writes: say where",
        ),
    ],
)
def test_options_that_cannot_be(files, options, reason):
    given = {"environment": str(files / "sums.py"), "python": str(PYTHON)} | options
    with pytest.raises(UserError, match=reason):
        VerifiersTasks(VerifiersTasks.Options(**given)).load_tasks("train", 0)
