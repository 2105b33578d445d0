"""Policy losses against the written formulas in plain floats, hand-worked cases and finite differences."""

import math

import pytest
import torch
from rlhf_authoring.tensors import make_batch

from rlhf_host import functional as F
from rlhf_host.records.tensors import LOSS, SEQUENCE_MEAN_TOKEN_MEAN, TOKEN_MEAN, LossTerm, Metric, Outputs

NAN = float("nan")
LOSSES = sorted(F.policy_losses)


def clip(x, low, high):
    return min(max(x, low), high)


def formula(loss, x, frozen, old, a, sequence_ratio, options):
    """One token's loss as written; ``frozen`` is log π behind a stop-gradient, ``sequence_ratio`` GSPO's frozen ``s_i``."""
    ratio, frozen_ratio = math.exp(x - old), math.exp(frozen - old)
    if loss == "clip":
        value = min(ratio * a, clip(ratio, 1 - options.clip_eps, 1 + options.clip_eps_high) * a)
        return -max(value, options.dual_clip * a) if a < 0 and options.dual_clip else -value
    if loss == "gspo":
        s = sequence_ratio * math.exp(x - frozen)
        return -min(s * a, clip(s, 1 - options.gspo_eps, 1 + options.gspo_eps_high) * a)
    if loss == "cispo":
        return -min(frozen_ratio, options.cispo_max) * a * x
    if loss == "sapo":
        tau = options.sapo_tau if a > 0 else options.sapo_tau_negative
        return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * a
    if loss == "dppo_tv":
        moved = math.exp(frozen) - math.exp(old)
        kept = moved <= options.dppo_delta if a > 0 else moved >= -options.dppo_delta
        return -min(frozen_ratio, options.dppo_max) * a * x if kept else 0.0
    if loss == "ratio":
        return -ratio * a
    if loss == "dro":
        return -(a * x - options.dro_beta / 2 * (x - old) ** 2)
    return -a * x


def written(loss, logprobs, old, advantages, mask, options):
    """Values and central finite differences of ``formula``, ``[B, T]`` float64, 0 outside ``mask``."""
    values, gradients = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
    step = 1e-6
    for i, row in enumerate(mask.tolist()):
        gaps = [float(logprobs[i, t] - old[i, t]) for t, counts in enumerate(row) if counts]
        ratio = math.exp(sum(gaps) / len(gaps)) if gaps else 1.0
        for t, counts in enumerate(row):
            if not counts:
                continue
            x, o, a = float(logprobs[i, t]), float(old[i, t]), float(advantages[i, t])
            values[i, t] = formula(loss, x, x, o, a, ratio, options)
            above, below = (formula(loss, x + h, x, o, a, ratio, options) for h in (step, -step))
            gradients[i, t] = (above - below) / (2 * step)
    return values, gradients


def random_batch(seed=1, spread=1.0, rows=8, dtype=torch.float64):
    """Probabilities that differ by about ``spread`` nats; masks with holes."""
    batch = make_batch([9, 3, 7, 9, 1, 5, 8, 6][:rows], observations=True, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    old, gap, noise = (torch.randn(batch.action_mask.shape, generator=generator, dtype=dtype) for _ in range(3))
    batch.old_logprobs = -old.abs() - 0.1
    batch.advantages = noise
    logprobs = (batch.old_logprobs + spread * gap).clamp(max=-1e-3)
    return batch, logprobs


def policy_term(logprobs, batch, options):
    """The policy term's values and their summed gradient."""
    logprobs = logprobs.clone().requires_grad_()
    items = F.policy_loss(Outputs(logprobs), batch, options)
    (term,) = [item for item in items if isinstance(item, LossTerm)]
    (gradient,) = torch.autograd.grad(term.values.sum(), logprobs)
    return term.values.detach(), gradient


def metrics_of(loss, logprobs, old, advantages, **options):
    mask = torch.ones(logprobs.shape, dtype=torch.bool)
    _, found = F.policy_losses[loss](logprobs, old, advantages, mask, F.PolicyLossOptions(loss=loss, **options))
    return {metric.name: metric.values.tolist()[0] for metric in found}


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("clip", {}),
        ("clip", {"dual_clip": None, "clip_eps": 0.1, "clip_eps_high": 0.4}),
        ("gspo", {}),
        ("gspo", {"gspo_eps": 0.3, "gspo_eps_high": 0.2}),
        ("cispo", {}),
        ("cispo", {"cispo_max": 1.5}),
        ("sapo", {}),
        ("sapo", {"sapo_tau": 2.0, "sapo_tau_negative": 3.0}),
        ("dppo_tv", {}),
        ("dppo_tv", {"dppo_delta": 0.05, "dppo_max": 2.0}),
        ("ratio", {}),
        ("pg", {}),
        ("dro", {}),
        ("dro", {"dro_beta": 2.0}),
    ],
)
@pytest.mark.parametrize("spread", [1e-3, 1.0])
def test_values_and_gradients_are_those_of_the_written_formula(loss, options, spread):
    options = F.PolicyLossOptions(loss=loss, **options)
    batch, logprobs = random_batch(spread=spread)
    values, gradients = policy_term(logprobs, batch, options)
    expected = written(loss, logprobs, batch.old_logprobs, batch.advantages, batch.loss_mask, options)
    assert torch.allclose(torch.where(batch.loss_mask, values, 0.0), expected[0], rtol=1e-9, atol=1e-12)
    assert torch.allclose(gradients, expected[1], rtol=1e-5, atol=1e-8)


def test_clip_hand_worked():
    """Ratio 1.5 with A = 2 is cut at 1.28; ratio 0.5 with A = -1 at 0.8; ratio 5 with A = -1 at the dual clip 3."""
    logprobs = torch.tensor([[1.5, 0.5, 5.0]]).log()
    mask = torch.ones(1, 3, dtype=torch.bool)
    advantages = torch.tensor([[2.0, -1.0, -1.0]])
    values, _ = F.policy_losses["clip"](logprobs, torch.zeros(1, 3), advantages, mask, F.PolicyLossOptions())
    assert values[0].tolist() == pytest.approx([-2.56, 0.8, 3.0])
    fractions = metrics_of("clip", logprobs, torch.zeros(1, 3), advantages)
    assert fractions == {"clip_fraction": [1.0, 1.0, 1.0], "dual_clip_fraction": [0.0, 0.0, 1.0]}


def test_gspo_hand_worked():
    """Ratios 2 and 1/2 are one sequence of ratio 1: nothing is clipped, and each token's gradient is −A, not −ρA."""
    batch = make_batch([2])
    batch.old_logprobs = torch.tensor([[-1.0, -1.0]])
    batch.advantages = torch.tensor([[3.0, 3.0]])
    logprobs = batch.old_logprobs + torch.tensor([[math.log(2), -math.log(2)]])
    values, gradient = policy_term(logprobs, batch, F.PolicyLossOptions(loss="gspo"))
    assert values.tolist() == [[-3.0, -3.0]]
    assert gradient.tolist() == [[-3.0, -3.0]]


def test_gspo_takes_the_mean_over_the_loss_mask_only():
    """A token out of the loss (its own ratio e) plays no part in its sequence's ratio."""
    batch = make_batch([3])
    batch.old_logprobs = torch.full((1, 3), -2.0)
    batch.advantages = torch.ones(1, 3)
    batch.loss_mask = torch.tensor([[True, False, True]])
    values, gradient = policy_term(torch.tensor([[-2.0, -1.0, -2.0]]), batch, F.PolicyLossOptions(loss="gspo"))
    assert values.tolist() == [[-1.0, 0.0, -1.0]]
    assert gradient.tolist() == [[-1.0, 0.0, -1.0]]


def test_the_gspo_loss_has_the_gradient_of_the_sequence_objective():
    """Unclipped, with one advantage per sequence: the token mean's gradient is that of ``−s_i·A`` by plain autograd."""
    batch, logprobs = random_batch(seed=9)
    batch.advantages = batch.advantages[:, :1].expand(-1, 9).clone()
    options = F.PolicyLossOptions(loss="gspo", gspo_eps=0.999, gspo_eps_high=1e3)
    count = batch.loss_mask.sum(-1, keepdim=True)
    _, gradient = policy_term(logprobs, batch, options)
    x = logprobs.clone().requires_grad_()
    ratio = (((x - batch.old_logprobs) * batch.loss_mask).sum(-1) / count[:, 0]).exp()
    (expected,) = torch.autograd.grad(-(ratio * batch.advantages[:, 0]).sum(), x)
    assert torch.allclose(gradient / count, expected, atol=1e-12)


def test_cispo_hand_worked():
    """Ratio 2 weighs 2, ratio e³ weighs the bound 5; every token keeps a gradient."""
    batch = make_batch([2])
    batch.old_logprobs = torch.tensor([[-1.0 - math.log(2), -4.0]])
    batch.advantages = torch.tensor([[1.0, -1.0]])
    logprobs = torch.tensor([[-1.0, -1.0]])
    values, gradient = policy_term(logprobs, batch, F.PolicyLossOptions(loss="cispo"))
    assert values[0].tolist() == pytest.approx([2.0, -5.0])
    assert gradient[0].tolist() == pytest.approx([-2.0, 5.0])
    assert metrics_of("cispo", logprobs, batch.old_logprobs, batch.advantages) == {"clip_fraction": [0.0, 1.0]}


def test_sapo_hand_worked():
    """At ratio 1 the gate is open: value −2A/τ, gradient −A. At ratio 1 + ln 3 (τ = 1) the sigmoid is 3/4, so 3/4 of the
    gradient is left."""
    old, advantages = torch.zeros(1, 3), torch.tensor([[1.0, -1.0, 1.0]])
    logprobs = torch.tensor([[1.0, 1.0, 1 + math.log(3)]]).log().requires_grad_()
    mask = torch.ones(1, 3, dtype=torch.bool)
    values, metrics = F.policy_losses["sapo"](logprobs, old, advantages, mask, F.PolicyLossOptions(loss="sapo"))
    values.sum().backward()
    assert values[0].tolist() == pytest.approx([-2.0, 2.0 / 1.05, -3.0])
    assert logprobs.grad[0].tolist() == pytest.approx([-1.0, 1.0, -0.75 * (1 + math.log(3))])
    assert metrics[0].name == "gate"
    assert metrics[0].values[0].tolist() == pytest.approx([1.0, 1.0, 0.75])


def test_dppo_hand_worked():
    """A rare token may grow a hundredfold (the weight stops at 20); a likely one may not move by more than δ = 0.15, unless
    it moves back."""
    old = torch.tensor([[1e-5, 0.5, 0.9, 0.9]]).log()
    logprobs = torch.tensor([[1e-3, 0.7, 0.7, 0.7]]).log()
    advantages = torch.tensor([[1.0, 1.0, -1.0, 1.0]])
    batch = make_batch([4])
    batch.old_logprobs, batch.advantages = old, advantages
    _, gradient = policy_term(logprobs, batch, F.PolicyLossOptions(loss="dppo_tv"))
    assert gradient[0].tolist() == pytest.approx([-20.0, 0.0, 0.0, -7 / 9])
    assert metrics_of("dppo_tv", logprobs, old, advantages) == {"clip_fraction": [0.0, 1.0, 1.0, 0.0]}


@pytest.mark.parametrize("loss", LOSSES)
def test_at_ratio_one_every_loss_has_the_gradient_of_the_policy_gradient(loss):
    batch, _ = random_batch(dtype=torch.float32)
    batch.old_logprobs = None
    _, gradient = policy_term(-torch.rand(batch.action_mask.shape) - 0.1, batch, F.PolicyLossOptions(loss=loss))
    assert torch.allclose(gradient, torch.where(batch.loss_mask, -batch.advantages, 0.0))


@pytest.mark.parametrize("loss", LOSSES)
class TestInvariance:
    def test_masked_garbage_and_padding(self, loss):
        options = F.PolicyLossOptions(loss=loss)
        batch, logprobs = random_batch(dtype=torch.float32)
        clean = policy_term(logprobs, batch, options)
        for garbage in (NAN, math.inf, -math.inf, 1e30):
            fields = {"old_logprobs": batch.old_logprobs, "advantages": batch.advantages, "logprobs": logprobs}
            dirty = {name: torch.where(batch.loss_mask, x, garbage) for name, x in fields.items()}
            wide = {name: torch.nn.functional.pad(x, (0, 4), value=garbage) for name, x in dirty.items()}
            padded = batch.select(range(len(batch)), trim=False)
            padded.loss_mask = torch.nn.functional.pad(batch.loss_mask, (0, 4))
            padded.old_logprobs, padded.advantages = wide["old_logprobs"], wide["advantages"]
            values, gradient = policy_term(wide["logprobs"], padded, options)
            assert torch.isfinite(values).all()
            assert torch.equal(values[:, :9], clean[0])
            assert torch.equal(gradient[:, :9], clean[1])
            assert gradient[:, 9:].eq(0).all()

    def test_rows_alone_permuted_or_together(self, loss):
        options = F.PolicyLossOptions(loss=loss)
        batch, logprobs = random_batch(dtype=torch.float32)
        values, gradient = policy_term(logprobs, batch, options)
        for rows in ([5, 0, 7, 3, 1, 6, 2, 4], [2], [4, 6]):
            part = policy_term(logprobs[rows], batch.select(rows, trim=False), options)
            assert torch.allclose(part[0], values[rows], rtol=1e-6)
            assert torch.allclose(part[1], gradient[rows], rtol=1e-6)

    def test_tokens_out_of_the_loss_are_as_if_cut_out(self, loss):
        options = F.PolicyLossOptions(loss=loss)
        batch, logprobs = random_batch()
        values, gradient = policy_term(logprobs, batch, options)
        for row, kept in enumerate(batch.loss_mask):
            short = make_batch([int(kept.sum())])
            short.old_logprobs, short.advantages = batch.old_logprobs[row, kept][None], batch.advantages[row, kept][None]
            alone = policy_term(logprobs[row, kept][None], short, options)
            assert torch.allclose(alone[0][0], values[row, kept], rtol=1e-12)
            assert torch.allclose(alone[1][0], gradient[row, kept], rtol=1e-12)

    def test_fully_masked_rows_are_finite_and_without_gradient(self, loss):
        batch, logprobs = random_batch(dtype=torch.float32)
        batch.loss_mask[:] = False
        values, gradient = policy_term(torch.full_like(logprobs, NAN), batch, F.PolicyLossOptions(loss=loss))
        assert torch.isfinite(values).all()
        assert gradient.eq(0).all()

    @pytest.mark.parametrize("gap", [50.0, -50.0, 1e4, -1e4])
    @pytest.mark.parametrize("dual_clip", [3.0, None])
    def test_extreme_gaps_and_advantages_stay_finite(self, loss, gap, dual_clip):
        batch = make_batch([4])
        logprobs = torch.tensor([[-0.1, -0.1, -60.0, -60.0]])
        batch.old_logprobs = logprobs - gap
        batch.advantages = torch.tensor([[1e6, -1e6, 1e6, -1e6]])
        values, gradient = policy_term(logprobs, batch, F.PolicyLossOptions(loss=loss, dual_clip=dual_clip))
        assert torch.isfinite(values).all()
        assert torch.isfinite(gradient).all()


def test_fused_mode_is_a_corrected_term_of_ratio_one():
    batch = make_batch([4, 4], seed=3)
    batch.advantages = torch.ones_like(batch.sampler_logprobs)
    (term,) = [
        i for i in F.policy_loss(Outputs(batch.sampler_logprobs), batch, F.PolicyLossOptions()) if isinstance(i, LossTerm)
    ]
    assert (term.name, term.mask, term.corrected, term.aggregation) == ("policy", LOSS, True, TOKEN_MEAN)
    assert term.values[batch.loss_mask].tolist() == [-1.0] * int(batch.loss_mask.sum())


def test_the_entropy_bonus_is_a_term_of_its_own_with_the_same_aggregation():
    batch = make_batch([2, 3], seed=4)
    batch.advantages = torch.zeros_like(batch.sampler_logprobs)
    entropy = torch.where(batch.loss_mask, 1.0, NAN)
    options = F.PolicyLossOptions(loss="sapo", entropy_coef=0.01)
    items = F.policy_loss(Outputs(batch.sampler_logprobs, entropy=entropy), batch, options)
    policy, bonus = [i for i in items if isinstance(i, LossTerm)]
    assert (bonus.name, bonus.coefficient, bonus.corrected) == ("entropy", 0.01, False)
    assert policy.aggregation == bonus.aggregation == SEQUENCE_MEAN_TOKEN_MEAN
    assert bonus.values.tolist() == torch.where(batch.loss_mask, -1.0, 0.0).tolist()


def test_metrics_count_loss_tokens_only():
    batch, logprobs = random_batch()
    for loss in LOSSES:
        metrics = [i for i in F.policy_loss(Outputs(logprobs), batch, F.PolicyLossOptions(loss=loss)) if isinstance(i, Metric)]
        assert bool(metrics) == (loss not in ("pg", "ratio", "dro"))
        assert all(metric.mask is batch.loss_mask and not metric.values.requires_grad for metric in metrics)


def test_a_loss_added_by_name_is_used(monkeypatch):
    def squared(logprobs, old_logprobs, advantages, mask, options):
        return logprobs.square(), [Metric("seen", 1.0)]

    monkeypatch.setitem(F.policy_losses, "squared", squared)
    batch, logprobs = random_batch()
    term, metric = F.policy_loss(Outputs(logprobs), batch, F.PolicyLossOptions().model_copy(update={"loss": "squared"}))
    assert torch.equal(term.values, torch.where(batch.loss_mask, logprobs.square(), 0.0))
    assert metric.name == "seen"


@pytest.mark.parametrize("missing", ["logprobs", "advantages", "entropy"])
def test_what_is_missing_is_named(missing):
    batch = make_batch([2])
    batch.advantages = None if missing == "advantages" else torch.zeros_like(batch.sampler_logprobs)
    outputs = Outputs(None if missing == "logprobs" else batch.sampler_logprobs)
    with pytest.raises(ValueError, match=missing):
        F.policy_loss(outputs, batch, F.PolicyLossOptions(entropy_coef=0.1))
