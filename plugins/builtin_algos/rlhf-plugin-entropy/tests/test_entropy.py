"""The chosen tokens against loops, options that have no effect, and real runs of three steps."""

from __future__ import annotations

import json
import statistics

import pytest
import torch
from rlhf_authoring.learner import SUMS, Learner, right_answer
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_entropy import ClipCov, KLCov, TopEntropy

import rlhf_host
from rlhf_host import LossTerm, Outputs, UserError


@pytest.fixture
def batch():
    batch = make_batch([5, 7, 3, 6], observations=True)
    random = torch.Generator().manual_seed(1)
    batch.advantages = torch.randn(batch.action_mask.shape, generator=random)
    batch.logprobs["actor"] = -2 * torch.rand(batch.action_mask.shape, generator=random)
    batch.entropy["actor"] = torch.rand(batch.action_mask.shape, generator=random)
    return batch


def covariances(batch):
    """Place → covariance, in Python's own numbers."""
    places = [tuple(place) for place in batch.loss_mask.nonzero().tolist()]
    both = [[float(values[place]) for place in places] for values in (batch.advantages, batch.logprobs["actor"])]
    means = [statistics.fmean(values) for values in both]
    return {place: (a - means[0]) * (b - means[1]) for place, a, b in zip(places, *both, strict=True)}


def test_clip_cov_draws_among_the_tokens_between_the_limits(batch):
    among = {place for place, value in covariances(batch).items() if 0.1 < value < 0.5}
    assert 2 < len(among) < 15
    plugin = ClipCov(ClipCov.Options(share=1.0, low=0.1, high=0.5))
    kept = plugin.prepare_batch(batch)["kept"]
    assert {tuple(place) for place in (~kept).nonzero().tolist()} == among
    few = ClipCov(ClipCov.Options(share=0.12, low=0.1, high=0.5))
    drawn = {tuple(place) for place in (~few.prepare_batch(batch)["kept"]).nonzero().tolist()}
    assert len(drawn) == max(1, int(0.12 * int(batch.loss_mask.sum())))
    assert drawn <= among
    batch.step = 7
    others = [{tuple(place) for place in (~few.prepare_batch(batch)["kept"]).nonzero().tolist()} for _ in range(2)]
    assert others[0] == others[1], "the step fixes them"
    batch.own = {"kept": kept}
    assert torch.equal(plugin.importance_weights(batch), kept.float())


def test_kl_cov_holds_the_tokens_of_the_highest_covariance(batch):
    order = sorted(covariances(batch).items(), key=lambda item: -item[1])
    plugin = KLCov(KLCov.Options(share=0.3, coef=0.5))
    batch.own = plugin.prepare_batch(batch)
    held = {tuple(place) for place in batch.own["held"].nonzero().tolist()}
    assert held == {place for place, _ in order[: int(0.3 * len(order))]}
    logprobs = (batch.logprobs["actor"] + 0.25).requires_grad_()
    term, _ = plugin.compute_loss(Outputs(logprobs=logprobs), batch)
    assert isinstance(term, LossTerm)
    assert (term.coefficient, term.corrected) == (0.5, False)
    term.values.sum().backward()
    assert torch.equal(logprobs.grad, batch.own["held"].float())
    assert term.values[batch.own["held"]].tolist() == pytest.approx([0.25] * len(held))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_top_entropy_keeps_the_tokens_from_the_quantile_on(batch, share):
    known = batch.entropy["actor"][batch.loss_mask].double()
    kept = TopEntropy(TopEntropy.Options(share=share)).prepare_batch(batch)["kept"]
    expected = batch.entropy["actor"].double() >= torch.quantile(known, 1 - share)
    assert torch.equal(kept[batch.loss_mask], expected[batch.loss_mask])
    assert kept[~batch.loss_mask].all()


def test_a_batch_without_tokens_in_the_loss(batch):
    batch.loss_mask = torch.zeros_like(batch.loss_mask)
    assert not KLCov(KLCov.Options()).prepare_batch(batch)["held"].any()
    for plugin in (ClipCov(ClipCov.Options()), TopEntropy(TopEntropy.Options())):
        assert plugin.prepare_batch(batch)["kept"].all()


def test_an_algorithm_without_advantages_is_refused(batch):
    batch.advantages = None
    for plugin in (ClipCov(ClipCov.Options()), KLCov(KLCov.Options())):
        with pytest.raises(UserError, match="clip_cov and kl_cov need advantages, and the algorithm computes none"):
            plugin.prepare_batch(batch)


def train(run, name, **more):
    fixed = {"train.threads": 1, "actor.model": "quickstart", "rollout.max_new_tokens": 4, "n": 8, "batch_size": 8, "steps": 3}
    rlhf_host.train(
        algo=Learner(),
        reward=right_answer,
        data=SUMS,
        extensions=[name],
        run_dir=str(run),
        lr=1e-3,
        **{**fixed, "train.epochs": 2, **more},
    )
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "option", "metric"),
    [
        ("clip_cov", {"clip_cov.share": 0.2, "clip_cov.low": 0.0}, "clip_cov/drawn"),
        ("kl_cov", {"kl_cov.share": 0.2}, "kl_cov/moved"),
        ("top_entropy", {}, "top_entropy/kept"),
    ],
)
def test_a_run_trains_with_it(tmp_path, name, option, metric):
    rows = train(tmp_path / "run", name, **option)
    assert all(metric in row for row in rows)
    assert any(0 < row[metric] < 1 for row in rows)
    assert any(row["grad_norm"] > 0 for row in rows)


def test_a_penalty_that_would_do_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match="which one update per batch does not see"):
        train(tmp_path / "run", "kl_cov", **{"train.epochs": 1})
    with pytest.raises(UserError, match="low 2 is not below high 1"):
        train(tmp_path / "run", "clip_cov", **{"clip_cov.low": 2, "clip_cov.high": 1})
    assert not (tmp_path / "run").exists()
