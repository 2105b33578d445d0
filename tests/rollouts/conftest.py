"""A collector over a scripted engine."""

import asyncio

import pytest
from rlhf_authoring.engines import ScriptedEngine
from transformers import AutoTokenizer

from rlhf_host import ScoreContext, Task
from rlhf_host.config.schema import RolloutConfig
from rlhf_host.data.stream import Draw
from rlhf_host.records.episodes import Sampling
from rlhf_host.rollouts.collect import Collector
from rlhf_host.rollouts.episode_settings import EpisodeSettings, SampledModel
from rlhf_host.rollouts.episodes import Episodes
from rlhf_host.rollouts.gate import Gate


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


def _play(work):
    return asyncio.run(work())


@pytest.fixture
def collect(tokenizer):
    def run(
        manager,
        *,
        groups=3,
        n=2,
        script=None,
        settings=None,
        max_tokens=64,
        tasks=None,
        split="train",
        sampling=None,
        play=None,
    ):
        engine = ScriptedEngine(script or (lambda ids, key: [4 + key[1]] * (1 + key[1] + ids[0] % 3)))
        sampling = sampling or Sampling(max_new_tokens=8)
        settings = settings or RolloutConfig()
        episodes = Episodes(
            manager,
            SampledModel(engine=Gate(engine), tokenizer=tokenizer, vocabulary=len(tokenizer)),
            EpisodeSettings(sampling=sampling, max_tokens=max_tokens, rollout=settings),
        )
        collector = Collector(episodes, n=n, seed=7, split=split)
        drawn = iter(range(10_000))

        def draw(count):
            made = (Task("12", "12", index=index, source="made", prompt_ids=(3 + index, 4)) for index in drawn)
            return [Draw(tasks[next(drawn)] if tasks else next(made), 0) for _ in range(count)]

        try:
            return (play or _play)(lambda: collector.fill(draw, groups, ScoreContext())), engine
        finally:
            manager.close()

    return run
