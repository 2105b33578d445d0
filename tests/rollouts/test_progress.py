"""How far a rollout is: tokens count, for those who look and for the watch that ends what does not move."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from rlhf_authoring.engines import ScriptedEngine

from rlhf_host import RunError, ScoreContext, Task
from rlhf_host.config.schema import EvalConfig, RolloutConfig
from rlhf_host.data.stream import Draw
from rlhf_host.protocols import Counting
from rlhf_host.records.episodes import Generation, Sampling
from rlhf_host.rollouts import collect, watch
from rlhf_host.rollouts.collect import Collected, Collector
from rlhf_host.rollouts.episode_settings import EpisodeSettings, SampledModel
from rlhf_host.rollouts.episodes import Episodes
from rlhf_host.rollouts.gate import Gate
from rlhf_host.training.evaluate import Evaluation

from .playing import Length, load


@dataclass(slots=True)
class Slow(ScriptedEngine):
    """Samples a token of every request each ``pace_s``, and answers at the end, as a first batch of a real model does."""

    sampled: int = 0
    length: int = 40
    pace_s: float = 0.02
    stops_after: int = 1_000_000
    """So many tokens."""
    busy: set = field(default_factory=set)

    async def generate(self, token_ids, sampling, key):
        tokens = 0
        while tokens < self.length:
            await asyncio.sleep(self.pace_s)
            if self.sampled < self.stops_after:
                self.sampled += 1
                tokens += 1
        return Generation([4] * tokens, [-0.5] * tokens, [0] * tokens, "stop")


def collector_of(engine, tokenizer, split, **settings):
    manager, rollout = load(Length()), RolloutConfig(**settings)
    episodes = Episodes(
        manager,
        SampledModel(engine=Gate(engine), tokenizer=tokenizer),
        EpisodeSettings(sampling=Sampling(max_new_tokens=64), max_tokens=128, rollout=rollout),
    )
    return Collector(episodes, n=2, seed=7, split=split)


def tasks(count):
    return [Task("12", "12", index=i, source="made", prompt_ids=(3, 4)) for i in range(count)]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Seconds stand for minutes."""
    monkeypatch.setattr(watch, "SAY_S", 0.2)
    for split in collect.TELL_S:
        monkeypatch.setitem(collect.TELL_S, split, 0.2)


def test_an_evaluation_that_samples_is_no_hang_though_no_task_is_over(tokenizer, capsys, caplog):
    collector = collector_of(Slow(lambda ids, key: []), tokenizer, "eval", stall_s=0.4)
    evaluation = Evaluation(tasks(3), collector, EvalConfig(n=2), {}, tokenizer)
    metrics, _ = asyncio.run(evaluation.run(0))
    assert metrics["eval/samples"] == 6.0
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Evaluating: ")]
    assert len(told) >= 2
    assert all(line.startswith("Evaluating: 0 of 3 tasks are finished, ") for line in told[:-1])
    counts = [int(line.split(", ")[1].split(" tokens")[0]) for line in told]
    assert 0 < counts[0] < counts[-1] <= 240
    assert not caplog.messages


def test_so_it_is_for_training(tokenizer, capsys, caplog):
    collector = collector_of(Slow(lambda ids, key: []), tokenizer, "train", stall_s=0.4)
    collected = Collected()
    asyncio.run(collector.run([Draw(task, 0) for task in tasks(3)], ScoreContext(), collected))
    assert collected.trajectories == 6
    assert "Sampling: 0 of 3 tasks are finished, " in capsys.readouterr().err
    assert not caplog.messages


def test_an_engine_that_samples_nothing_more_is_told_of_and_ended(tokenizer, caplog):
    collector = collector_of(Slow(lambda ids, key: [], stops_after=50), tokenizer, "eval", stall_s=0.6)
    with pytest.raises(RunError, match=r"no progress in the rollout for 1 s \(rollout.stall_s 0.6\): eval-0-0 plays"):
        asyncio.run(Evaluation(tasks(3), collector, EvalConfig(n=2), {}, tokenizer).run(0))
    assert "6 requests are with the engine" in caplog.text


def test_an_engine_that_does_not_count_is_told_of_by_its_answers(tokenizer, capsys, caplog):
    class Silent(ScriptedEngine):
        async def generate(self, token_ids, sampling, key):
            await asyncio.sleep(0.7 * (key[1] == 1))
            return await super().generate(token_ids, sampling, key)

    assert not isinstance(Silent(lambda ids, key: [4]), Counting)
    collector = collector_of(Silent(lambda ids, key: [4]), tokenizer, "eval")
    asyncio.run(Evaluation(tasks(3), collector, EvalConfig(n=2), {}, tokenizer).run(0))
    assert "Evaluating: 0 of 3 tasks are finished ..." in capsys.readouterr().err
    assert "3 requests are with the engine" in caplog.text


def test_answers_of_frozen_roles_move_too(tokenizer):
    opponent = Slow(lambda ids, key: [], sampled=7)
    own = collector_of(Slow(lambda ids, key: [], sampled=2), tokenizer, "train").episodes
    own.frozen = {"opponent": collector_of(opponent, tokenizer, "train").episodes}
    assert own.sampled == 9
