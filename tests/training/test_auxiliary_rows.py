"""Rows that train beside a batch, in losses of their plugin alone: ``auxiliary_rows``."""

from __future__ import annotations

import json
import math

import pytest
import torch
from rlhf_authoring.tensors import make_batch

import rlhf_host
from rlhf_host import Extra, LossTerm, Metric, RunError, Segment, Task, Trajectory, hookimpl
from rlhf_host.records.tensors import TopK
from rlhf_host.training.auxiliary_rows import joined
from rlhf_host.training.reduction import Denominators, Reducer

DATA = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in ((17, 35), (38, 26), (41, 29), (56, 17))]


def right(completions, label, **_):
    return [float(text.strip() == want) for text, want in zip(completions, label, strict=True)]


def row(prompt, *parts, **more):
    """Parts are ``(kind, tokens)``."""
    segments = [Segment("prompt", prompt), *(Segment(kind, tokens) for kind, tokens in parts)]
    return Trajectory("any", "any", Task("given"), segments, **more)


class Given:
    """Gives rows, and a loss that is their mean negative log-likelihood."""

    def __init__(self, rows, extra=None):
        self.rows, self.extra, self.seen = rows, extra, []

    @hookimpl
    def auxiliary_rows(self, step):
        return self.rows(step)

    @hookimpl
    def prepare_batch(self, experience):
        return self.extra

    @hookimpl
    def compute_loss(self, outputs, batch):
        mask = batch.own["beside"]
        self.seen.append((mask.clone(), batch.loss_mask.clone(), batch.completion_ids.clone()))
        nll = torch.where(mask, -outputs.logprobs, 0.0)
        yield LossTerm("given", nll, mask=Extra("beside"), coefficient=0.5)
        yield Metric("given/nll", nll.detach(), mask)


def train(tmp_path, plugin, name="run", **more):
    fixed = {"train.threads": 1, "actor.model": "quickstart", "rollout.max_new_tokens": 4, "n": 4, "batch_size": 4, "steps": 2}
    rlhf_host.train(
        algo="rloo", reward=right, data=DATA, extensions=[plugin], run_dir=str(tmp_path / name), lr=1e-3, **{**fixed, **more}
    )
    return [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]


ROWS = [
    row([5, 6], ("action", [7, 8, 1])),
    row([5], ("observation", [9]), ("action", [4]), ("observation", [3, 3]), ("action", [8, 1])),
]


@pytest.mark.parametrize("minibatches", [1, 2, 3])
def test_hook_auxiliary_rows_trains_rows_in_the_losses_of_its_plugin(tmp_path, minibatches):
    plugin = Given(lambda step: ROWS)
    rows = train(tmp_path, plugin, **{"train.minibatches": minibatches})
    marked = torch.cat([mask.flatten() for mask, _, _ in plugin.seen])
    assert int(marked.sum()) == 2 * 6, "each row once in a step, by its actions alone"
    assert not any((mask & others).any() for mask, others, _ in plugin.seen)
    tokens = sorted(token for mask, _, ids in plugin.seen for token in ids[mask].tolist())
    assert tokens == sorted(2 * [7, 8, 1, 4, 8, 1])
    assert all(math.isfinite(one["given/nll"]) and one["given/nll"] > 0 for one in rows)


def test_steps_and_minibatches_without_rows_train_as_ever(tmp_path):
    plugin = Given(lambda step: ROWS if step == 1 else None)
    rows = train(tmp_path, plugin, **{"train.minibatches": 3})
    assert "given/nll" in rows[0]
    assert "given/nll" not in rows[1]
    assert rows[1]["grad_norm"] > 0


def test_a_batch_that_filters_left_short_trains_with_all_rows(tmp_path):
    """One group is left of four, so there is one update, of three."""

    class Choosy(Given):
        @hookimpl
        def keep_group(self, group):
            return group.task.prompt == DATA[0]["prompt"]

    more = {"train.minibatches": 3, "rollout.max_refills": 0, "steps": 1}
    plugin = Choosy(lambda step: ROWS)
    train(tmp_path, plugin, **more)
    assert int(torch.cat([mask.flatten() for mask, _, _ in plugin.seen]).sum()) == 6


def test_the_rest_of_the_batch_does_not_notice(tmp_path):
    class Silent(Given):
        @hookimpl
        def compute_loss(self, outputs, batch):
            yield LossTerm("given", outputs.logprobs * 0.0, mask=Extra("beside"))

    with_rows = train(tmp_path, Silent(lambda step: ROWS), "with")
    without = train(tmp_path, Silent(lambda step: None), "without")
    for one, two in zip(with_rows, without, strict=True):
        for name in ("loss/policy", "grad_norm", "entropy", "reward/mean", "advantages/std", "length/mean", "clip_fraction"):
            assert one.get(name) == pytest.approx(two.get(name), rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        (Given(lambda step: [row([5, 6], ("observation", [7]))]), "a row without a prompt, or without an action"),
        (Given(lambda step: [row([], ("action", [7]))]), "a row without a prompt, or without an action"),
        (Given(lambda step: ROWS, {"beside": torch.zeros(16, dtype=torch.bool)}), "gave 'beside' from prepare_batch"),
    ],
)
def test_rows_that_cannot_train_end_the_run(tmp_path, plugin, said):
    with pytest.raises(RunError, match=said):
        train(tmp_path, plugin)


def test_a_joined_batch_has_every_field_of_both():
    batch, rows = make_batch([3, 5], groups=[0, 1]), make_batch([7, 2, 4], groups=[0, 1, 2], seed=5)
    batch.logprobs, batch.values = {"reference": batch.sampler_logprobs.clone()}, {"critic": torch.ones(2, 5)}
    batch.bootstrap, batch.old_logprobs = {"critic": torch.ones(2)}, batch.sampler_logprobs.clone()
    batch.distributions = {"teacher": TopK(torch.ones(2, 5, 3), torch.ones(2, 5, 3, dtype=torch.int64))}
    batch.advantages = batch.action_mask.float()
    batch.columns, rows.columns = {"margin": torch.ones(2)}, {"weight": torch.ones(3)}
    batch.prompts = {"teacher": [[1, 2], [3, 4]]}
    batch.parent, batch.branch = torch.tensor([-1, 0]), torch.tensor([0, 4])
    batch.extra = {"mine": {"beside": torch.zeros(2, 5, dtype=torch.bool), "rate": 0.5}, "other": {"each": torch.ones(2, 5)}}
    both = joined(batch, rows, "mine")
    assert len(both) == 5
    assert both.lengths.tolist() == [3, 5, 7, 2, 4]
    for field in ("action_mask", "loss_mask", "sampler_logprobs", "advantages", "old_logprobs", "token_rewards"):
        assert getattr(both, field).shape == (5, 7), field
        assert not getattr(both, field)[2:].any(), field
        assert torch.equal(getattr(both, field)[:2, :5], getattr(batch, field)), field
    assert torch.equal(both.completion_ids[2:], rows.completion_ids)
    assert both.extra["mine"]["beside"][2:].sum(-1).tolist() == [7, 2, 4]
    assert not both.extra["mine"]["beside"][:2].any()
    assert (both.extra["mine"]["rate"], both.extra["other"]["each"][2:].sum()) == (0.5, 0.0)
    assert both.group_id.tolist() == [0, 1, 2, 3, 4]
    assert both.episode_id.tolist() == [0, 1, 2, 3, 4]
    assert (both.parent.tolist(), both.branch.tolist()) == ([-1, 0, -1, -1, -1], [0, 4, 0, 0, 0])
    assert both.columns["margin"].isnan().tolist() == [False, False, True, True, True]
    assert both.columns["weight"].isnan().tolist() == [True, True, False, False, False]
    assert both.plugin_rewards[2:].isnan().all()
    assert both.distributions["teacher"].ids.shape == (5, 7, 3)
    assert both.bootstrap["critic"].tolist() == [1, 1, 0, 0, 0]
    assert [list(ids) for ids in both.prompts["teacher"]] == [[1, 2], [3, 4], *map(list, rows.prompt_ids)]
    part = both.select([4, 0])
    assert part.extra["mine"]["beside"].sum(-1).tolist() == [4, 0]
    weights = Reducer(Denominators.of(both))
    ones = LossTerm("nll", torch.ones(5, 7), mask=Extra("beside"))
    assert float(weights.reduce(ones, list(range(5)), None, "mine")) == pytest.approx(1.0)
    policy = LossTerm("policy", torch.ones(5, 7))
    assert float(weights.reduce(policy, list(range(5)), None)) == pytest.approx(1.0)
