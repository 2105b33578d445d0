"""Sampler-to-trainer corrections against TRL, verl and OpenRLHF: weights, and the policy loss they enter."""

import math
from types import SimpleNamespace

import pytest
import torch
from rlhf_plugin_off_policy import TIS, IcePop, OffPolicyMask, SequenceMask, SequenceTruncate

from rlhf_host import Metric, PolicyLogprobs
from rlhf_host.training.reduction import reduced


def ours(plugin, case, **options):
    """``[B, T]`` weights; NaN stands wherever the batch is masked."""
    current = case.logprobs.masked_fill(~case.mask, float("nan"))
    logprobs = PolicyLogprobs(current, case.batch.old_logprobs, case.batch.sampler_logprobs)
    found = plugin(plugin.Options(**options)).importance_weights(logprobs, case.batch)
    return found if found.dim() == 2 else torch.where(case.mask, found.unsqueeze(-1), 1.0)


def verls(verl, case, level, threshold):
    mask = case.mask.double()
    return verl.corrections.compute_rollout_correction_weights(case.old - case.sampler, mask, level, threshold)


def kept_by_verl(verl, case, rule, threshold):
    mask = case.mask.double()
    return verl.corrections.compute_rollout_rejection_mask(case.old - case.sampler, mask, rule, threshold)[0].bool()


def trls(trl, case, mode, low, high):
    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )
    names = {"self": trainer, "completion_mask": case.mask.double(), "tool_mask": None}
    names |= {"old_per_token_logps": case.old, "sampling_per_token_logps": case.sampler}
    first, last = "mask = completion_mask if tool_mask is None", "# Compute the per-token log probabilities for the reference"
    found = trl.statements(trl.grpo.GRPOTrainer, first, last, **names).vllm_importance_sampling_ratio
    return found.expand(case.mask.shape)


def assert_weights(mine, theirs, case):
    mine, theirs = mine[case.mask], theirs[case.mask]
    assert mine.unique().numel() > 1, "nothing was compared"
    torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-12)


@pytest.fixture
def case(make_case):
    return make_case(spread=0.7, observations=True)


# --- per token ----------------------------------------------------------------------------------------


def test_tis_is_that_of_trl_and_verl(case, trl, verl):
    mine = ours(TIS, case, cap=2.0)
    assert (mine == 2).any()
    assert_weights(mine, verls(verl, case, "token", 2.0)[0], case)
    assert_weights(mine, trls(trl, case, "token_truncate", None, 2.0), case)
    assert_weights(ours(TIS, case, low=0.5, high=2.0), trls(trl, case, "token_truncate", 0.5, 2.0), case)


def test_icepop_is_that_of_trl_and_verl(case, trl, verl):
    mine = ours(IcePop, case, low=0.5, high=2.0)
    assert (mine[case.mask] == 0).any()
    assert_weights(mine, verls(verl, case, "token", "0.5_2.0")[0], case)
    assert_weights(mine, trls(trl, case, "token_mask", 0.5, 2.0), case)


@pytest.mark.parametrize(
    ("plugin", "options", "theirs"),
    [
        (TIS, {"low": 0.5, "high": 2.0}, {"is_correction_level": "token", "is_correction_mode": "clip"}),
        (IcePop, {"low": 0.5, "high": 2.0}, {"is_correction_level": "token", "is_correction_mode": "mask"}),
        (
            SequenceMask,
            {"statistic": "geometric", "low": 0.85, "high": 1.2, "token_weight": "token_truncated", "cap": 1e9},
            {"is_correction_level": "seq", "is_correction_mode": "mask", "is_correction_threshold": (0.85, 1.2)},
        ),
    ],
)
def test_the_corrected_loss_is_openrlhfs_with_zeros_in_the_denominator(case, same, openrlhf, plugin, options, theirs):
    weights = ours(plugin, case, **options)
    assert weights[case.mask].unique().numel() > 2
    settings = {"is_correction_threshold": (0.5, 2.0), "clip_eps_high": 0.28, "dual_clip": 3.0, **theirs}
    same(case.ours(weights, loss="clip"), openrlhf.policy(case, case.sampler, **settings), case.logprobs)


def test_the_corrected_loss_is_that_of_verl_and_trl(case, same, verl, trl):
    weights = ours(IcePop, case, low=0.5, high=2.0)
    theirs = torch.where(case.mask, weights, 0.0)
    same(case.ours(weights, loss="clip"), verl.loss("vanilla", case, weights=theirs, clip_ratio_high=0.28), case.logprobs)
    same(case.ours(weights, loss="clip", dual_clip=None), trl.loss(case, theirs), case.logprobs)


# --- per sequence -------------------------------------------------------------------------------------


def test_sequence_truncate_is_that_of_trl_and_verl(case, trl, verl):
    mine = ours(SequenceTruncate, case, cap=1.5)
    assert_weights(mine, verls(verl, case, "sequence", 1.5)[0], case)
    assert_weights(mine, trls(trl, case, "sequence_truncate", None, 1.5), case)


def test_sequence_mask_is_that_of_trl_and_verl(case, trl, verl):
    mine = ours(SequenceMask, case, statistic="sum", low=0.3, high=3.0, token_weight="sequence")
    assert (mine[case.mask] == 0).any()
    assert_weights(mine, trls(trl, case, "sequence_mask", 0.3, 3.0), case)
    assert_weights(mine, verls(verl, case, "sequence", "0.3_3.0")[0], case)


@pytest.mark.parametrize(
    ("statistic", "rule", "bounds", "threshold"),
    [
        ("sum", "seq_sum_k1", {"low": 0.5, "high": 2.0}, "0.5_2.0"),
        ("geometric", "seq_mean_k1", {"low": 1 / 1.15, "high": 1.15}, "1.15"),
        ("k3", "seq_mean_k3", {"high": 0.25}, "0.25"),
    ],
)
def test_gates_of_sequences_are_verls_rejections(case, verl, statistic, rule, bounds, threshold):
    mine = ours(SequenceMask, case, statistic=statistic, token_weight="one", **bounds)
    assert torch.equal(mine[case.mask] != 0, kept_by_verl(verl, case, rule, threshold)[case.mask])
    assert mine[case.mask].unique().tolist() == [0, 1]


def test_verls_k1_bounds_hold_for_the_inverse_ratio(case, verl):
    ratio = (case.old - case.sampler).exp()
    assert torch.equal(kept_by_verl(verl, case, "token_k1", "0.2_1.25"), (1 / ratio >= 0.2) & (1 / ratio <= 1.25) & case.mask)
    assert torch.equal((ours(IcePop, case, low=0.2, high=1.25) != 0) & case.mask, (ratio >= 0.2) & (ratio <= 1.25) & case.mask)
    mine = ours(IcePop, case, low=1 / 1.25, high=1 / 0.2) != 0
    assert torch.equal(mine & case.mask, kept_by_verl(verl, case, "token_k1", "0.2_1.25"))


def test_what_verl_rejects_leaves_its_denominator(case, same, verl):
    kept = kept_by_verl(verl, case, "token_k1", "0.5_2.0")
    weights = (ours(IcePop, case, low=0.5, high=2.0) != 0).double()
    rest = kept.sum() / case.mask.sum()
    assert 0.2 < rest < 0.95
    ours_loss, whole = case.ours(weights, loss="pg"), case.mask
    case.mask = kept
    theirs = verl.loss("gpg", case)
    case.mask = whole
    same(lambda x: ours_loss(x) / rest, theirs, case.logprobs)


def test_openrlhfs_gspo_puts_the_sampler_into_the_ratio_itself(make_case, same, openrlhf):
    case = make_case(spread=2e-4, per_token=False)
    theirs = openrlhf.policy(
        case, case.sampler, policy_loss_type="gspo", clip_eps_low=3e-4, clip_eps_high=4e-4, is_correction_level="token"
    )
    case.batch.old_logprobs = case.batch.sampler_logprobs
    same(case.ours(loss="gspo"), theirs, case.logprobs)


# --- off-policy mask ----------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [0.0, 0.1])
def test_the_off_policy_mask_is_trls(make_case, trl, delta):
    case = make_case((5, 7, 3, 6, 4, 7, 5, 6), (0, 0, 0, 0, 1, 1, 1, 1), per_token=False, observations=True)
    mask = case.mask.double()
    theirs = trl.grpo.GRPOTrainer.get_off_policy_mask(case.advantages[:, :1], case.logprobs, case.sampler, mask, delta)
    mine = ours(OffPolicyMask, case, delta=delta)
    assert_weights(mine, theirs.expand(mine.shape), case)


def test_the_masked_loss_is_trls(make_case, same, trl):
    case = make_case(per_token=False)
    weights = ours(OffPolicyMask, case, delta=0.05)
    assert (weights[case.mask] == 0).any()
    theirs = trl.loss(case, off_policy_mask_threshold=0.05)
    same(case.ours(weights, loss="clip", dual_clip=None), theirs, case.logprobs)


# --- metrics ------------------------------------------------------------------------------------------


def test_the_effective_sample_size_is_verls(case, verl):
    metrics = verls(verl, case, "token", 2.0)[1]
    mine = reduced([Metric("ess", ours(TIS, case, cap=2.0), case.mask, reduce="ess")])["ess"]
    assert mine == pytest.approx(float(metrics["rollout_is_eff_sample_size"]), rel=1e-6)
    assert not math.isclose(mine, 1.0, abs_tol=0.05)
