"""A fake NeMo Gym, and a policy that says what a test says."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from rlhf_authoring import ScriptedEngine
from rlhf_authoring.models import TOOLS_TEMPLATE, byte_tokenizer
from rlhf_plugin_nemo_gym import NemoGym
from rlhf_plugin_nemo_gym.rows import task_of

from rlhf_host import Episode, Sampling, Task
from rlhf_host.config.schema import RolloutConfig
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.plugins.selection import find
from rlhf_host.rollouts.endpoints import Endpoints
from rlhf_host.rollouts.episode_settings import EpisodeSettings, SampledModel
from rlhf_host.rollouts.episodes import Episodes
from rlhf_host.rollouts.gate import Gate

HERE = Path(__file__).parent
ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


def row(a=2, b=3, tools=True, **more):
    params = {"input": [{"role": "user", "content": f"{a}+{b}?"}], "parallel_tool_calls": False}
    return {"responses_create_params": params | ({"tools": [ADD]} if tools else {}), "expected": a + b, **more}


def call(a, b):
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {json.dumps(a)}, "b": {json.dumps(b)}}}}}\n</tool_call>'


@pytest.fixture(scope="session")
def gym_python(tmp_path_factory):
    """A Python with the fake beside it."""
    folder = tmp_path_factory.mktemp("venv") / "bin"
    folder.mkdir()
    script = folder / "gym"
    script.write_text(f"#!{sys.executable}\n" + (HERE / "fake_gym.py").read_text())
    script.chmod(0o755)
    (folder / "python").symlink_to(sys.executable)
    return str(folder / "python")


@pytest.fixture(scope="session")
def gym_config(tmp_path_factory):
    file = tmp_path_factory.mktemp("configs") / "calculator.yaml"
    file.write_text("calculator: {responses_api_agents: {simple_agent: {entrypoint: app.py}}}\n# responses_api_models/\n")
    return str(file)


@pytest.fixture
def options(gym_python, gym_config, monkeypatch):
    """Options that start the fake."""
    monkeypatch.setattr("rlhf_plugin_nemo_gym.servers.MODEL", gym_config)
    return {"configs": [gym_config], "python": gym_python, "start_timeout_s": 20, "run_timeout_s": 20}


@pytest.fixture
def play(options):
    """``play(rows, say, ...)``: for each row, what the host has of its episode: trajectories, or the exception."""

    def run(rows, say, *, max_tokens=4000, max_new_tokens=200, retries=0, port=0, engine_fails=None, **more):
        agent = NemoGym(NemoGym.Options(**(options | more)))
        tokenizer = byte_tokenizer(TOOLS_TEMPLATE)

        def script(ids, key):
            if engine_fails is not None:
                raise engine_fails
            said = say(tokenizer.decode(ids))
            return [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]

        async def main():
            endpoints = Endpoints(port=port)
            manager = PluginManager([Loaded("agent", "nemo_gym", find("agent", "nemo_gym"), agent)])
            episodes = Episodes(
                manager,
                SampledModel(engine=Gate(ScriptedEngine(script)), tokenizer=tokenizer),
                EpisodeSettings(
                    sampling=Sampling(max_new_tokens=max_new_tokens),
                    max_tokens=max_tokens,
                    rollout=RolloutConfig(episode_retries=retries, episode_timeout_s=50),
                ),
                endpoints,
            )
            tasks = [one if isinstance(one, Task) else task_of(one, "here") for one in rows]
            playing = [episodes.play(Episode(f"e{number}", "g", task, sample=number)) for number, task in enumerate(tasks)]
            try:
                return await asyncio.gather(*playing, return_exceptions=True)
            finally:
                await agent.run_finished(None)
                await endpoints.close()
                manager.close()

        return asyncio.run(asyncio.wait_for(main(), 60))

    return run


def processes():
    """Command lines of all that runs."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return found
