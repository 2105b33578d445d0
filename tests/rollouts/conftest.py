"""A collector and a pipeline over a scripted engine."""

import asyncio

import pytest
from rlhf_authoring.engines import ScriptedEngine
from transformers import AutoTokenizer

from rlhf_host import ScoreContext, Task
from rlhf_host.config.schema import RolloutConfig
from rlhf_host.data.stream import Draw, TaskSet, TaskStream
from rlhf_host.records.episodes import Sampling
from rlhf_host.rollouts.admission import Admission, InAdvance
from rlhf_host.rollouts.collect import Collector
from rlhf_host.rollouts.episode_settings import EpisodeSettings, SampledModel
from rlhf_host.rollouts.episodes import Episodes
from rlhf_host.rollouts.gate import Gate
from rlhf_host.rollouts.overtaking import Overtaking
from rlhf_host.rollouts.pipeline import Pipeline

from .pipelines import Slept, Slow
from .playing import Length, load


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
            SampledModel(engine=Gate(engine), tokenizer=tokenizer, vocabulary=len(tokenizer) + 8, texts=len(tokenizer)),
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


@pytest.fixture
def pipeline(tokenizer):
    """A pipeline over tasks that take so many milliseconds each, and its gate."""

    def make(ms, *plugins, batch=2, depth=1, most=None, steps=6, agent=None, settings=None, threads=True):
        manager = load(Length(), *plugins, agent=agent or Slow(), threads=threads)
        gate = Gate(Slept(lambda ids, key: [4 + key[1], 5]))
        settings = settings or RolloutConfig(max_refills=3)
        episodes = Episodes(
            manager,
            SampledModel(engine=gate, tokenizer=tokenizer),
            EpisodeSettings(sampling=Sampling(max_new_tokens=8), max_tokens=64, rollout=settings),
        )
        collector = Collector(episodes, n=2, seed=7, split="train")
        tasks = [Task("12", "12", {"ms": each}, index=i, source="made", prompt_ids=(3, 4)) for i, each in enumerate(ms)]
        stream = TaskStream(TaskSet({"made": tasks}, {"made": 1.0}), shuffle=False)
        sizes = batch, depth, steps, batch * (1 + settings.max_refills)
        rule = Admission if depth else InAdvance
        admission = rule(*sizes) if most is None else Overtaking(*sizes, max_staleness=most)
        return Pipeline(stream, collector, admission, ScoreContext()), gate

    return make
