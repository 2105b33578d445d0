"""KL estimators, their gradients as a loss, the penalty in the reward and its controller, against TRL, verl and OpenRLHF."""

import pytest
import torch

from rlhf_host import Outputs
from rlhf_host import functional as F
from rlhf_host.extensions.kl import KL

NAMES = ("k1", "k2", "k3")


def masked(function, case):
    return lambda logprobs: (function(logprobs) * case.mask).sum()


@pytest.mark.parametrize("estimator", NAMES)
def test_estimators_are_those_of_verl_and_openrlhf(make_case, same, verl, openrlhf, estimator):
    case = make_case()
    garbage = case.reference.masked_fill(~case.mask, float("nan"))
    mine = masked(lambda x: F.kl_estimate(x, garbage, case.mask, estimator), case)
    theirs = masked(lambda x: verl.core.kl_penalty(x, case.reference, estimator), case)
    same(mine, theirs, case.logprobs)
    # OpenRLHF computes them in float32
    found = openrlhf.utils.compute_approx_kl(case.logprobs, case.reference, kl_estimator=estimator) * case.mask
    expected = F.kl_estimate(case.logprobs, case.reference, case.mask, estimator)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-6)


def test_k3_in_the_loss_is_trls(make_case, same, trl):
    case = make_case()
    mine = case.ours(loss="clip", dual_clip=None, aggregation="token-mean")
    tokens = case.mask.sum()

    def with_kl(logprobs):
        return mine(logprobs) + 0.1 * F.kl_loss(logprobs, case.reference, case.mask, "k3").sum() / tokens

    same(with_kl, trl.loss(case, beta=0.1, reference=case.reference), case.logprobs)


def test_the_kl_term_is_a_token_mean_whatever_the_policy_loss_but_trl_and_verl_reduce_both_alike(make_case, same, trl, verl):
    case = make_case()
    case.batch.logprobs["reference"] = case.reference.masked_fill(~case.mask, float("nan"))
    case.batch.own = {"coef": 0.1}
    extension = KL(KL.Options(coef=0.1, place="loss", estimator="k3"))
    term = case.reduced(lambda x: list(extension.compute_loss(Outputs(logprobs=x), case.batch)))
    case.advantages = torch.zeros_like(case.advantages)
    same(term, trl.loss(case, beta=0.1, reference=case.reference, loss_type="dapo"), case.logprobs)
    theirs = trl.loss(case, beta=0.1, reference=case.reference, loss_type="grpo")

    def per_sequence(logprobs):
        estimate = 0.1 * verl.core.kl_penalty(logprobs, case.reference, "k3")
        return verl.core.agg_loss(estimate, case.mask.double(), "seq-mean-token-mean")

    same(per_sequence, theirs, case.logprobs)
    assert float(term(case.logprobs)) != pytest.approx(float(theirs(case.logprobs)), rel=0.01)


def test_a_large_k3_is_cut_at_ten_by_verl_and_openrlhf_with_its_gradient(make_case, gradient, verl, openrlhf):
    logprobs, reference = torch.tensor([[-6.0]]), torch.tensor([[-1.0]])
    mask = torch.ones(1, 1, dtype=torch.bool)
    exact = torch.tensor(5.0).exp() - 1 - 5
    assert float(F.kl_estimate(logprobs, reference, mask, "k3")) == pytest.approx(float(exact), rel=1e-6)
    assert float(verl.core.kl_penalty(logprobs, reference, "k3")) == 10
    assert float(openrlhf.utils.compute_approx_kl(logprobs, reference, kl_estimator="k3")) == 10
    assert gradient(lambda x: verl.core.kl_penalty(x, reference, "k3").sum(), logprobs).eq(0).all()
    assert gradient(lambda x: F.kl_loss(x, reference, mask, "k3").sum(), logprobs).abs().min() > 100


def test_the_unbiased_loss_has_the_gradient_of_openrlhfs(make_case, same, openrlhf):
    case = make_case(spread=1.5)
    assert ((case.logprobs - case.sampler).exp() > 10).any()
    mine = masked(lambda x: F.kl_loss(x, case.reference, case.mask, "unbiased", case.batch.sampler_logprobs), case)
    for estimator in NAMES:
        theirs = masked(
            lambda x, name=estimator: openrlhf.utils.compute_approx_kl(
                x, case.reference, case.sampler, kl_estimator=name, unbiased_gradient=True
            ),
            case,
        )
        found, expected = (_gradient(loss, case.logprobs) for loss in (mine, theirs))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_unbiased_loss_has_the_gradient_of_trls_corrected_k3_while_the_ratio_is_below_ten(make_case, same, trl):
    """``∇(ρ·k3) = ρ·x·∇log π = ∇(sg(ρ)·x²/2)``."""
    case = make_case(spread=0.5, per_token=True)
    assert ((case.logprobs - case.old).exp() < 10).all()
    case.advantages = torch.zeros_like(case.advantages)
    mine = masked(lambda x: F.kl_loss(x, case.reference, case.mask, "unbiased", case.old) / case.mask.sum(), case)
    theirs = trl.loss(case, beta=1.0, reference=case.reference, use_bias_correction_kl=True)
    same(mine, theirs, case.logprobs, value=False)


def test_verls_plus_is_the_gradient_of_k2(make_case, same, verl):
    case = make_case()
    mine = masked(lambda x: F.kl_loss(x, case.reference, case.mask, "unbiased"), case)
    for name in ("k1+", "k3+"):
        same(mine, masked(lambda x, n=name: verl.core.kl_penalty(x, case.reference, n), case), case.logprobs, value=False)


def _gradient(loss, logprobs):
    leaf = logprobs.clone().requires_grad_()
    loss(leaf).backward()
    return leaf.grad


@pytest.mark.parametrize("observations", [False, True])
def test_the_penalty_in_the_reward_is_that_of_verl_and_openrlhf(make_case, verl, openrlhf, observations):
    case = make_case(observations=observations)
    batch = case.batch
    batch.logprobs = {
        name: value.masked_fill(~case.mask, float("nan")).float()
        for name, value in (("actor", case.old), ("reference", case.reference))
    }
    shaped = KL(KL.Options(coef=0.1)).shape_rewards(batch)
    ours = torch.where(case.mask, batch.token_rewards + shaped, 0.0)
    theirs = verl.core.compute_rewards(case.token_rewards, case.old, case.reference, 0.1) * case.mask
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    theirs = openrlhf.utils.compute_reward(batch.rewards, 0.1, case.old - case.reference, case.mask) * case.mask
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_adaptive_controller_is_that_of_verl_and_openrlhf(make_case, verl, openrlhf):
    case = make_case()
    case.batch.logprobs = {"actor": case.old, "reference": case.reference}
    ours = KL(KL.Options(coef=0.05, controller="adaptive", target=0.02, horizon=100))
    theirs = [
        verl.core.AdaptiveKLController(0.05, target_kl=0.02, horizon=100),
        openrlhf.kl_controller.AdaptiveKLController(0.05, target=0.02, horizon=100),
    ]
    seen = {ours.coef}
    for kl in (0.5, 0.021, 0.019, 0.0, -1.0, 0.03):
        ours.prepare_batch(case.batch)
        ours.step_finished(1, {"kl": kl})
        for controller in theirs:
            controller.update(kl, len(case.batch))
            assert ours.coef == pytest.approx(controller.value, rel=1e-12)
        seen.add(ours.coef)
    assert len(seen) == 7, "each update moved it"
