"""Clip-Cov and KL-Cov against verl, and the tokens of the highest entropy against TRL: values and gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from rlhf_plugin_entropy import ClipCov, KLCov, TopEntropy

from rlhf_host import Outputs


def prepared(case, plugin):
    """The batch as the plugin sees it on policy: nothing has moved before the first update."""
    batch = case.batch
    batch.logprobs["actor"] = case.old
    batch.advantages = case.advantages.float()
    return plugin.prepare_batch(batch)


@pytest.fixture
def on_policy(make_case):
    case = make_case(spread=0.0)
    case.old = case.logprobs.clone()
    case.batch.old_logprobs = case.old
    return case


def test_clip_cov_is_that_of_verl(on_policy, same, verl):
    """verl draws at random: with so large a share it takes all tokens between the limits."""
    weights = prepared(on_policy, ClipCov(ClipCov.Options(share=1.0, low=0.1, high=0.9)))["kept"].double()
    assert 0 < int((weights == 0).sum()) < int(on_policy.mask.sum())
    policy = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.9}
    theirs = verl.loss("clip_cov", on_policy, clip_ratio=0.2, policy_loss=verl.policy(**policy))
    same(on_policy.ours(weights, dual_clip=None), theirs, on_policy.logprobs)


def test_kl_cov_is_that_of_verl(make_case, same, verl):
    case = make_case(spread=0.3)
    plugin = KLCov(KLCov.Options(share=0.3, coef=0.7))
    case.batch.logprobs["actor"], case.batch.advantages = case.logprobs.float(), case.advantages.float()
    held = plugin.prepare_batch(case.batch)  # verl chooses by the log-probabilities of the pass
    case.batch.own, case.batch.logprobs["actor"] = held, case.old
    policy = {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7}
    whole = verl.loss("kl_cov", case, policy_loss=verl.policy(**policy))
    without = verl.loss("kl_cov", case, policy_loss=verl.policy(**policy | {"ppo_kl_coef": 0.0}))
    ours = case.reduced(lambda logprobs: plugin.compute_loss(Outputs(logprobs=logprobs), case.batch))
    same(ours, lambda logprobs: whole(logprobs) - without(logprobs), case.logprobs)


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_top_entropy_is_that_of_trl(on_policy, trl, share):
    entropy = torch.rand(on_policy.mask.shape, generator=torch.Generator().manual_seed(2))
    on_policy.batch.entropy["actor"] = entropy
    kept = TopEntropy(TopEntropy.Options(share=share)).prepare_batch(on_policy.batch)["kept"]
    accelerator = SimpleNamespace(pad_across_processes=lambda values, **_: values, gather=lambda values: values)
    trainer = SimpleNamespace(accelerator=accelerator)
    theirs = trl.grpo.GRPOTrainer.get_high_entropy_mask(trainer, entropy, on_policy.mask.long(), 1 - share)
    assert torch.equal(kept & on_policy.mask, theirs.bool() & on_policy.mask)
