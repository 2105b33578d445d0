"""Evaluation: figures with their errors, every answer in a file, and how far it is."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics

import pytest
from rlhf_authoring.engines import ScriptedEngine
from transformers import AutoTokenizer

from rlhf_host import Step, Task, Trajectory, hookimpl
from rlhf_host.config.schema import EvalConfig, RolloutConfig
from rlhf_host.records.episodes import Sampling, Segment
from rlhf_host.records.figures import beside, figure
from rlhf_host.rollouts import collect
from rlhf_host.rollouts.collect import Collector
from rlhf_host.rollouts.episode_settings import EpisodeSettings, SampledModel
from rlhf_host.rollouts.episodes import Episodes
from rlhf_host.rollouts.gate import Gate
from rlhf_host.rollouts.summary import summary
from rlhf_host.training.evaluate import Evaluation
from rlhf_host.training.saved_rows import read_steps

from ..rollouts.playing import Length, load


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


FAILURE, UNJUDGED = "failed: the sandbox is down", "the judge is down"


def group(name, scores, source="", role=""):
    """Rows of a task; a text among the scores is why there is none."""

    def row(score):
        segments = [Segment("prompt", [1]), Segment("action", [2], [-1.0], [0])]
        own = {"unjudged_reason": score} if isinstance(score, str) else {"reward": 2 * score, "score": score}
        task = Task("p", "l", source=source)
        return Trajectory(f"{name}-{random.random()}", name, task, segments, role="" if score == FAILURE else role, **own)

    return [row(score) for score in scores]


def rows(*groups):
    return [row for each in groups for row in each]


def test_errors_are_over_tasks():
    """Samples of one task are not independent: four equal ones of each task say no more than one."""
    passed = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    once = summary(rows(*(group(str(i), [value]) for i, value in enumerate(passed))), EvalConfig(n=1))
    often = summary(rows(*(group(str(i), [value] * 4) for i, value in enumerate(passed))), EvalConfig(n=4))
    error = statistics.stdev(passed) / math.sqrt(6)
    for found in (once, often):
        assert found["pass@1/stderr"] == pytest.approx(error)
        assert found["score/stderr"] == pytest.approx(error)
        assert found["reward/stderr"] == pytest.approx(2 * error)
    assert not any(name.endswith("stderr") for name in summary(group("0", [1.0, 0.0]), EvalConfig(n=2)))


def test_the_interval_holds_the_truth_as_often_as_it_says():
    dice, held = random.Random(4), 0
    for _ in range(400):
        found = summary(rows(*(group(str(i), [float(dice.random() < 0.6)]) for i in range(100))), EvalConfig(n=1))
        held += abs(found["pass@1"] - 0.6) <= 1.96 * found["pass@1/stderr"]
    assert 0.91 < held / 400 < 0.98


def test_a_failed_episode_counts_as_wrong_and_is_said_beside_each_figure():
    answers = rows(*(group(str(i), [1.0] if i < 950 else [FAILURE]) for i in range(1500)))
    found = {f"eval/{name}": value for name, value in summary(answers, EvalConfig(n=1)).items()}
    assert (found["eval/samples"], found["eval/failed"], found["eval/unjudged"]) == (1500, 550, 0)
    assert found["eval/pass@1"] == found["eval/score/mean"] == pytest.approx(950 / 1500)
    assert figure(found, "eval/pass@1", ".3f") == "0.633 ± 0.024 (95 %)"
    assert beside(found, "eval/pass@1") == "36.7 % of the episodes failed and count as wrong"
    assert beside(found, "eval/reward/mean") == "36.7 % of the episodes failed and are left out"
    assert summary(group("0", [FAILURE] * 3), EvalConfig(n=3)) == {"samples": 3, "failed": 3, "failed/share": 1, "unjudged": 0}


def test_figures_of_a_source_have_its_own_failures_beside_them():
    answers = rows(group("0", [FAILURE] * 2, "org/sums"), group("1", [1.0, 0.0, 1.0, FAILURE], "essays"))
    found = {f"eval/{name}": value for name, value in summary(answers, EvalConfig(n=1)).items()}
    for source in ("org/sums", "essays"):
        own = summary([row for row in answers if row.task.source == source], EvalConfig(n=1), scored=True)
        found |= {f"eval/{source}/{name}": value for name, value in own.items()}
    assert (found["eval/org/sums/pass@1"], found["eval/essays/pass@1"], found["eval/pass@1"]) == (0.0, 0.5, 0.25)
    assert beside(found, "eval/org/sums/pass@1") == "100 % of the episodes failed and count as wrong"
    assert beside(found, "eval/essays/score/mean") == "25 % of the episodes failed and count as wrong"
    assert beside(found, "eval/essays/reward/mean") == "25 % of the episodes failed and are left out"
    assert beside(found, "eval/pass@1") == "50 % of the episodes failed and count as wrong"
    alone = summary(group("0", [UNJUDGED] * 2), EvalConfig(n=1), scored=True)
    assert "pass@1" not in alone


def test_a_failed_episode_is_a_wrong_answer_of_every_role():
    answers = rows(group("0", [1.0, 1.0, FAILURE], role="writer"), group("0", [1.0, 0.0], role="critic"))
    found = summary(answers, EvalConfig(n=3))
    assert found["pass@1"] == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert found["pass@3"] == 1.0


@pytest.mark.parametrize("seed", range(40))
def test_figures_with_unjudged_answers_are_a_range_that_holds_whatever_they_are(seed):
    dice = random.Random(seed)
    groups = [group(str(i), dice.choices([1.0, 0.0, FAILURE, UNJUDGED], k=4)) for i in range(6)]
    found = summary(rows(*groups), EvalConfig(n=4, k=[2]))
    if found["samples"] == found["failed"] + found["unjudged"]:
        return
    for _ in range(10):
        for row in rows(*groups):
            if row.unjudged_reason == UNJUDGED:
                row.score = row.reward = float(dice.random() < 0.5)
        true = summary(rows(*groups), EvalConfig(n=4, k=[2]))
        for name in ("pass@1", "pass@2", "pass@4", "score/mean"):
            stem = name.removesuffix("/mean")
            assert found.get(f"{stem}/low", true[name]) <= true[name] + 1e-9
            assert found.get(f"{stem}/high", true[name]) >= true[name] - 1e-9
        for row in rows(*groups):
            if row.unjudged_reason == UNJUDGED:
                row.score = row.reward = None


def test_a_source_without_scores_is_no_wrong_answer():
    answers = rows(group("0", [1.0, 0.0], "sums"), group("1", [1.0, 1.0], "essays"))
    for row in answers[2:]:
        row.score = None
    assert summary(answers, EvalConfig(n=2))["pass@1"] == 0.5


def test_how_far_it_is_can_be_seen(tokenizer, monkeypatch, capsys):
    class Slow:
        @hookimpl
        def agent_reset(self, episode):
            return Step(episode.task.prompt)

        @hookimpl
        async def agent_step(self, episode, action):
            await asyncio.sleep(0.5 * (episode.task.index == 3))
            return Step(done=True)

    monkeypatch.setitem(collect.TELL_S, "eval", 0.2)
    settings = RolloutConfig()
    manager = load(Length(), agent=Slow())
    engine = ScriptedEngine(lambda ids, key: [4, 5])
    episodes = Episodes(
        manager,
        SampledModel(engine=Gate(engine), tokenizer=tokenizer),
        EpisodeSettings(sampling=Sampling(max_new_tokens=8), max_tokens=64, rollout=settings),
    )
    tasks = [Task("12", "12", index=i, source="made", prompt_ids=(3, 4)) for i in range(4)]
    collector = Collector(episodes, n=2, seed=7, split="eval")
    metrics, answers = asyncio.run(Evaluation(tasks, collector, EvalConfig(n=2), {}, tokenizer).run(0))
    assert len(answers) == 8
    assert metrics["eval/samples"] == 8.0
    said = capsys.readouterr().err.splitlines()
    assert "Evaluating: 3 of 4 tasks are finished ..." in said


def test_every_answer_is_written(rlhf_here, tiny_model, prompts, tmp_path):
    file = tmp_path / "answers.jsonl"
    flags = [
        "--actor.model",
        tiny_model,
        "--eval.data",
        f"{prompts}",
        "--reward",
        "vowels",
        "--eval.n",
        "2",
        "--rollout.max-new-tokens",
        "4",
    ]
    result = rlhf_here("eval", *flags, "--eval.data.max-samples", "6", "--output", file)
    assert result.exit_code == 0, result.output
    [step] = read_steps(file)
    assert (step.split, len(step.rows)) == ("eval", 12)
    rewards = [row.reward for row in step.rows]
    lines = [line.split() for line in result.stdout.splitlines()]
    [shown] = [line for line in lines if line[0] == "eval/reward/mean"]
    assert float(shown[1]) == pytest.approx(statistics.fmean(rewards), rel=1e-3)
    assert shown[2] == "±"
    assert not any("stderr" in line[0] for line in lines)
    again = rlhf_here("eval", *flags, "--output", file)
    assert again.exit_code == 2
    assert "already exists" in again.stderr
    found = json.loads(rlhf_here("eval", *flags, "--eval.data.max-samples", "6", "--json").stdout)
    assert found["eval/reward/stderr"] > 0
