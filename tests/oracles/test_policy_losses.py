"""Policy losses against TRL, verl and OpenRLHF: value and gradient, in float64, masked places holding NaN on our side."""

import pytest
import torch

CLIP = {"clip_eps": 0.2, "clip_eps_high": 0.28}


# --- clip ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.05, 0.6, 3.0])
def test_clip_with_separate_bounds_and_dual_clip_is_that_of_verl_and_openrlhf(make_case, same, verl, openrlhf, spread):
    case = make_case(spread=spread)
    ours = case.ours(loss="clip", dual_clip=3.0, **CLIP)
    same(ours, verl.loss("vanilla", case, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0), case.logprobs)
    same(ours, openrlhf.policy(case, clip_eps_low=0.2, clip_eps_high=0.28, dual_clip=3.0), case.logprobs)


def test_without_dual_clip_it_is_that_of_trl_and_openrlhf(make_case, same, trl, openrlhf):
    case = make_case(spread=2.0)
    ours = case.ours(loss="clip", dual_clip=None, **CLIP)
    same(ours, trl.loss(case), case.logprobs)
    same(ours, openrlhf.policy(case, clip_eps_low=0.2, clip_eps_high=0.28), case.logprobs)


def test_trls_delta_is_our_dual_clip(make_case, same, trl):
    case = make_case(spread=2.0)
    assert ((case.logprobs - case.old).exp() > 3)[case.advantages < 0].any()
    same(case.ours(loss="clip", dual_clip=3.0, **CLIP), trl.loss(case, delta=3.0), case.logprobs)


def test_fused_old_logprobs_are_trls_detached_ones(make_case, same, trl):
    case = make_case()
    case.batch.old_logprobs = None
    case.old = None
    same(case.ours(loss="clip"), trl.loss(case), case.logprobs)


def test_a_gap_of_a_hundred_nats_overflows_in_trl_alone(make_case, gradient, trl, verl, openrlhf):
    case = make_case()
    single = case.logprobs.float()
    case.old = torch.where(case.mask, single - 100, 0.0)
    case.advantages = -case.mask.float()
    case.batch.old_logprobs, case.batch.advantages = case.old, case.advantages
    bounded = [case.ours(loss="clip"), verl.loss("vanilla", case), openrlhf.policy(case, dual_clip=3.0)]
    for loss in bounded:
        assert loss(single).isfinite()
        assert gradient(loss, single).isfinite().all()
    assert trl.loss(case)(single).isinf()


def test_trls_rloo_clips_the_ratio_of_the_whole_sequence(make_case, same, gradient, trl):
    """On policy it is REINFORCE summed over the sequence; off policy the clip, meant for a token, stops whole sequences."""
    case = make_case(per_token=False)
    case.old = case.logprobs
    summed = case.ours(loss="pg", aggregation="sequence-mean-token-sum")
    same(summed, trl.rloo_loss(case), case.logprobs, value=False)

    case = make_case(per_token=False, spread=0.15)
    ours = gradient(case.ours(loss="clip", aggregation="sequence-mean-token-sum"), case.logprobs)
    theirs = gradient(trl.rloo_loss(case), case.logprobs)
    stopped = theirs.eq(0).all(-1)
    assert stopped.any()
    assert ours[stopped].abs().sum(-1).gt(0).all()


# --- sequence ratio -----------------------------------------------------------------------------------


def gspo(case, **more):
    return case.ours(loss="gspo", gspo_eps=3e-4, gspo_eps_high=4e-4, **more)


@pytest.mark.parametrize("spread", [1e-4, 5e-4, 0.3])
@pytest.mark.parametrize("per_token", [False, True])
def test_gspo_is_verls_whatever_the_advantages(make_case, same, verl, spread, per_token):
    case = make_case(spread=spread, per_token=per_token)
    theirs = verl.loss("gspo", case, "seq-mean-token-mean", clip_ratio_low=3e-4, clip_ratio_high=4e-4)
    same(gspo(case), theirs, case.logprobs)


def test_gspo_with_one_advantage_per_row_is_that_of_trl_and_openrlhf(make_case, same, trl, openrlhf):
    case = make_case(spread=4e-4, per_token=False)
    same(gspo(case), trl.loss(case, loss_type="grpo", importance_sampling_level="sequence", **bounds()), case.logprobs)
    theirs = openrlhf.policy(case, policy_loss_type="gspo", clip_eps_low=3e-4, clip_eps_high=4e-4)
    same(gspo(case), theirs, case.logprobs)


def test_with_advantages_per_token_a_broadcast_ratio_gives_every_token_the_mean_advantage(
    make_case, same, gradient, trl, openrlhf
):
    case = make_case(spread=1e-5)
    broadcast = trl.loss(case, loss_type="grpo", importance_sampling_level="sequence", **bounds())
    same(gspo(case), broadcast, case.logprobs, gradient=False)
    theirs = openrlhf.policy(case, policy_loss_type="gspo", clip_eps_low=3e-4, clip_eps_high=4e-4)
    same(gspo(case), theirs, case.logprobs, gradient=False)

    rows, lengths = len(case.batch), case.mask.sum(-1, keepdim=True)
    ratio = ((case.logprobs - case.old).sum(-1, keepdim=True) / lengths).exp()
    mean = case.advantages.sum(-1, keepdim=True) / lengths
    policy_gradient = -ratio * case.advantages / lengths / rows * case.mask
    torch.testing.assert_close(gradient(gspo(case), case.logprobs), policy_gradient)
    for loss in (broadcast, theirs):
        torch.testing.assert_close(gradient(loss, case.logprobs), -ratio * mean / lengths / rows * case.mask)


def bounds():
    return {"epsilon_low": 3e-4, "epsilon_high": 4e-4}


# --- weights on the policy gradient -------------------------------------------------------------------


def test_cispo_bounds_the_ratio_above_as_trl_does(make_case, same, trl):
    case = make_case(spread=2.0)
    assert ((case.logprobs - case.old).exp() > 5).any()
    same(case.ours(loss="cispo", cispo_max=5.0), trl.loss(case, loss_type="cispo", epsilon_high=5.0), case.logprobs)


def test_verls_cispo_also_bounds_it_below(make_case, same, gradient, verl):
    case = make_case(spread=2.0)
    ours = case.ours(loss="cispo", cispo_max=5.0)
    same(ours, verl.loss("cispo", case, clip_ratio_low=1.0, clip_ratio_high=4.0), case.logprobs)
    raised = gradient(verl.loss("cispo", case, clip_ratio_low=0.2, clip_ratio_high=4.0), case.logprobs)
    small = (case.logprobs - case.old).exp() < 0.8
    differs = ~torch.isclose(gradient(ours, case.logprobs), raised)
    assert torch.equal(differs, small & case.mask)
    assert small.any()


@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_sapo_is_that_of_trl_and_verl(make_case, same, trl, verl, spread):
    case = make_case(spread=spread)
    # 1.05 is the papers' value; TRL holds it in float32, so one that is exact there.
    ours = case.ours(loss="sapo", sapo_tau=1.0, sapo_tau_negative=1.0625)
    same(ours, trl.loss(case, loss_type="sapo", sapo_temperature_neg=1.0625), case.logprobs)
    same(ours, verl.loss("sapo", case, tau_pos=1.0, tau_neg=1.0625), case.logprobs)


@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_dppo_tv_is_verls(make_case, same, verl, spread):
    case = make_case(spread=spread)
    ours = case.ours(loss="dppo_tv", dppo_delta=0.15, dppo_max=20.0)
    settings = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.15, "clip_ratio_c": 20.0}
    same(ours, verl.loss("dppo_tv", case, **settings), case.logprobs)


def test_verls_dppo_tv_takes_its_defaults_from_the_clip(make_case, same, verl):
    case = make_case(spread=2.0)
    same(case.ours(loss="dppo_tv", dppo_delta=0.2, dppo_max=3.0), verl.loss("dppo_tv", case), case.logprobs)


def test_pg_is_verls_gpg(make_case, same, verl):
    case = make_case()
    same(case.ours(loss="pg"), verl.loss("gpg", case), case.logprobs)
