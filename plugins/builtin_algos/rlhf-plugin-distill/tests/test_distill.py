"""Distillation against hand-worked values."""

import importlib.metadata
import math

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_distill import Distill, OnPolicyDistill

from rlhf_host import Distribution, LossTerm, Metric, Output, Outputs

NAN = float("nan")
T, S = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])


def terms_of(plugin, outputs, batch):
    items = list(plugin.compute_loss(outputs, batch))
    metrics = {one.name: one.values[one.mask].tolist() for one in items if isinstance(one, Metric)}
    return {one.name: one for one in items if isinstance(one, LossTerm)}, metrics


@pytest.fixture
def batch():
    """One trained token, then one that is not."""
    batch = make_batch([2])
    batch.loss_mask[0, 1] = False
    return batch


def outputs(teacher=T, student=S):
    both = [torch.stack([values.log(), torch.full_like(values, NAN)])[None] for values in (teacher, student)]
    return Outputs(logprobs=torch.tensor([[math.log(0.25), NAN]]), others={"teacher": Distribution(*both)})


def loss(batch, plugin=Distill, teacher=T, student=S, **options):
    terms, _ = terms_of(plugin(plugin.Options(**options)), outputs(teacher, student), batch)
    assert terms["divergence"].values[0, 1] == 0
    return float(terms["divergence"].values[0, 0])


def kl(p, q):
    return pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)


def test_the_divergence_goes_from_forward_to_reverse(batch):
    assert loss(batch) == kl(T, S)
    assert loss(batch, beta=1) == kl(S, T)
    mixture = 0.25 * T + 0.75 * S
    expected = 0.25 * kl(T, mixture).expected + 0.75 * kl(S, mixture).expected
    assert loss(batch, beta=0.25) == pytest.approx(expected, rel=1e-5)
    assert loss(batch, OnPolicyDistill, signal="full") == kl(S, T)


def test_the_temperature_flattens_both(batch):
    flat = [p.sqrt() / p.sqrt().sum() for p in (T, S)]
    assert loss(batch, temperature=2) == kl(*flat)


def test_the_other_tokens_count_as_one_or_not_at_all(batch):
    teacher, student = torch.tensor([0.5, 0.25]), torch.tensor([0.25, 0.5])
    assert loss(batch, teacher=teacher, student=student, top_k=2) == kl(T, S)
    pair = [p / p.sum() for p in (teacher, student)]
    assert loss(batch, teacher=teacher, student=student, top_k=2, tail="renormalise") == kl(*pair)
    whole = [p.sqrt() / p.sqrt().sum() for p in (teacher, student)]
    options = {"top_k": 2, "tail": "renormalise", "temperature": 2}
    assert loss(batch, teacher=teacher, student=student, **options) == kl(*whole)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}])
def test_tokens_without_probability_give_finite_losses_and_gradients(batch, beta, options):
    one = outputs(torch.tensor([1.0, 1e-45, 1e-45]), S)
    one.others["teacher"].own.requires_grad_()
    terms, _ = terms_of(Distill(Distill.Options(beta=beta, **options)), one, batch)
    terms["divergence"].values.sum().backward()
    assert terms["divergence"].values.isfinite().all()
    assert one.others["teacher"].own.grad.isfinite().all()


def test_the_data_s_own_tokens_have_the_rest_of_the_weight(batch):
    terms, metrics = terms_of(Distill(Distill.Options(alpha=0.7)), outputs(), batch)
    assert terms["divergence"].coefficient == 0.7
    assert terms["cross_entropy"].coefficient == pytest.approx(0.3)
    assert terms["cross_entropy"].values.tolist() == [[pytest.approx(math.log(4)), 0.0]]
    assert metrics == {"divergence": [kl(T, S)], "nll": [pytest.approx(math.log(4))]}
    assert terms_of(Distill(Distill.Options()), outputs(), batch)[0].keys() == {"divergence"}


def test_sampled_tokens_have_the_teachers_advantage():
    batch = make_batch([3], observations=True)  # the third token is not the policy's
    batch.logprobs["teacher"] = torch.tensor([[-1.0, -3.0, NAN]])
    batch.sampler_logprobs = torch.tensor([[-2.0, -2.5, NAN]])
    plugin = OnPolicyDistill(OnPolicyDistill.Options())
    found = plugin.compute_advantages(batch)
    assert found.advantages.tolist() == [[1.0, -0.5, 0.0]]
    assert found.metrics[0].values[found.metrics[0].mask].tolist() == [-1.0, 0.5]
    batch.old_logprobs = torch.tensor([[-1.5, -2.5, NAN]])
    assert plugin.compute_advantages(batch).advantages.tolist() == [[0.5, -0.5, 0.0]]


@pytest.mark.parametrize(
    ("plugin", "options", "message"),
    [
        (Distill, {"alpha": 0}, "alpha"),
        (Distill, {"beta": 1.5}, "beta"),
        (Distill, {"tail": "renormalise"}, "top_k is 0: set top_k"),
        (Distill, {"top_k": 8, "temperature": 2}, "known at temperature 1 only"),
        (OnPolicyDistill, {"top_k": 8}, "signal sample compares sampled tokens and has no top_k"),
        (OnPolicyDistill, {"beta": 0.5}, "signal sample compares sampled tokens and has no beta"),
        (OnPolicyDistill, {"signal": "full", "loss": "pg"}, "signal full has no policy loss and so no loss"),
        (OnPolicyDistill, {"temperature": 2}, "temperature"),
    ],
)
def test_options_without_effect_are_refused(plugin, options, message):
    with pytest.raises(ValueError, match=message):
        plugin.Options(**options)


def test_needs_and_entry_points():
    needs = Distill(Distill.Options()).needs()
    assert (needs.data, needs.rewards) == ("prompt_completion", False)
    assert [(role.name, role.source, role.trainable) for role in needs.roles] == [
        ("actor", None, True),
        ("teacher", None, False),
    ]
    assert needs.outputs == (Output("distribution", role="teacher"),)
    assert Distill(Distill.Options(top_k=8)).needs().outputs == (Output("distribution", role="teacher", top=8),)
    sample = OnPolicyDistill(OnPolicyDistill.Options()).needs()
    assert (sample.data, sample.rewards, sample.weights) == ("prompts", False, "token")
    assert sample.outputs == (Output("logprobs", role="teacher"),)
    full = OnPolicyDistill(OnPolicyDistill.Options(signal="full")).needs()
    assert (full.data, full.rewards, full.weights) == ("prompts", False, None)
    assert full.outputs == (Output("distribution", role="teacher"),)
    entries = {e.name: e.load() for e in importlib.metadata.entry_points(group="rlhf.algos")}
    assert [entries[name] for name in ("distill", "on_policy_distill")] == [Distill, OnPolicyDistill]
