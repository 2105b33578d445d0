"""Episodes in a shell with a policy that says what a test says."""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
from rlhf_authoring import ScriptedEngine
from rlhf_authoring.models import TOOLS_TEMPLATE, byte_tokenizer
from rlhf_plugin_shell import ShellAgent

from rlhf_host import Episode, Sampling
from rlhf_host.installed import find
from rlhf_host.internals import Episodes, EpisodeSettings, Gate, Loaded, PluginManager, SampledModel
from rlhf_host.settings import RolloutConfig

collect_ignore_glob = [] if sys.platform == "linux" else ["test_*.py"]  # contained by system calls of Linux


class Played:
    """One episode: its row, its log, and the whole conversation as a text."""

    def __init__(self, row, episode, tokenizer):
        self.row, self.log = row, episode.events
        self.text = tokenizer.decode([token for segment in row.segments for token in segment.token_ids])

    @property
    def reward(self):
        *before, last = self.row.agent_rewards
        assert before == [None] * len(before)
        return last


class StandIn:
    """The stand-in for ``docker``, first in the path.

    Attributes:
        place: its folder.
    """

    def __init__(self, place):
        self.place = place
        for name in ("bin", "registry", "faults"):
            (place / name).mkdir()
        script = f'#!/bin/sh\nexec "{sys.executable}" -I -S "{Path(__file__).parent / "stand_in_docker.py"}" "$@"\n'
        for name in ("docker", "podman"):
            (place / "bin" / name).write_text(script)
            (place / "bin" / name).chmod(0o755)
        self.offer("debian:12")

    def offer(self, name, **config):
        """Makes an image that can be pulled."""
        (self.place / "registry" / f"{name.replace('/', '%')}.json").write_text(json.dumps(config))

    def fail(self, command, times):
        (self.place / "faults" / command).write_text(str(times))

    def there(self, kind="containers"):
        return [path.parent.name for path in self.place.glob(f"{kind}/*/about.json")]

    def about(self, name, kind="containers"):
        return json.loads((self.place / kind / name / "about.json").read_text())

    @property
    def calls(self):
        return [json.loads(line) for line in (self.place / "calls.jsonl").read_text().splitlines()]


@pytest.fixture
def docker(monkeypatch):
    """A ``StandIn``, which has no containers, networks and volumes in the end."""
    # A killed run's guard may still write its calls while the folder is removed.
    with tempfile.TemporaryDirectory(prefix="rlhf-test-docker-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        made = StandIn(Path(folder))
        monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
        monkeypatch.setenv("DOCKER_STAND_IN", folder)
        yield made
        assert [made.there(kind) for kind in ("containers", "networks", "volumes")] == [[], [], []]


@pytest.fixture
def play():
    """Plays a task: ``says`` is a list of answers, or a function of the text so far. Returns ``Played``."""

    def run(task, says, max_tokens=8000, new_tokens=2000, **options):
        agent = ShellAgent(ShellAgent.Options(**options))
        if agent.options.format == "auto":
            agent.format = "native"
        tokenizer = byte_tokenizer(TOOLS_TEMPLATE)
        answers = iter(says) if isinstance(says, list) else None

        def script(ids, key):
            said = says(tokenizer.decode(ids)) if answers is None else next(answers)
            return [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]

        async def main():
            manager = PluginManager([Loaded("agent", "shell", find("agent", "shell"), agent)])
            model = SampledModel(engine=Gate(ScriptedEngine(script)), tokenizer=tokenizer)
            rollout = RolloutConfig(episode_retries=0, episode_timeout_s=100)
            settings = EpisodeSettings(sampling=Sampling(max_new_tokens=new_tokens), max_tokens=max_tokens, rollout=rollout)
            episode = Episode("e", "g", task)
            try:
                [row] = await Episodes(manager, model, settings).play(episode)
                return Played(row, episode, tokenizer)
            finally:
                await agent.sandboxes.close()
                manager.close()

        return asyncio.run(main())

    return run
