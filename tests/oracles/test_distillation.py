"""Divergences of distillation against TRL's GKD: value and gradient by the student's logits, in float64."""

from __future__ import annotations

import importlib

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_distill import Distill, OnPolicyDistill

from rlhf_host import Distribution, LossTerm, Outputs
from rlhf_host.training.reduction import Denominators, token_weights

from .conftest import _borrowed

VOCABULARY = 23


@pytest.fixture(scope="session")
def jsd():
    with _borrowed("trl"):
        return importlib.import_module("trl.experimental.gkd.gkd_trainer").GKDTrainer.generalized_jsd_loss


@pytest.fixture
def batch():
    return make_batch((5, 7, 3), observations=True)


def logits(seed, shape, spread=2.0):
    return spread * torch.randn(*shape, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ours(batch, plugin, student, teacher, top_k=0):
    """The loss, reduced as the host does; masked places hold NaN."""
    logs = [values.log_softmax(-1) for values in (teacher, student)]
    logprobs = logs[1].gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)
    if top_k:
        ids = logs[0].topk(top_k).indices
        logs = [values.gather(-1, ids) for values in logs]
    dirty = [values.masked_fill(~batch.loss_mask.unsqueeze(-1), float("nan")) for values in logs]
    outputs = Outputs(logprobs=logprobs, others={"teacher": Distribution(*dirty)})
    total = torch.zeros((), dtype=torch.float64)
    for term in plugin.compute_loss(outputs, batch):
        if isinstance(term, LossTerm):
            weights = token_weights(term.aggregation, Denominators.of(batch).mask(term.mask), batch.group_id, batch.episode_id)
            total = total + term.coefficient * torch.where(weights > 0, term.values * weights, 0.0).sum()
    return total


def assert_same(one, two, student):
    (value, gradient), (other, other_gradient) = (
        (loss, torch.autograd.grad(loss, student, retain_graph=True)[0]) for loss in (one, two)
    )
    torch.testing.assert_close(value, other, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(gradient, other_gradient, rtol=1e-6, atol=1e-9)
    assert gradient.abs().max() > 1e-4


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_divergences_are_those_of_trl(batch, jsd, beta, temperature):
    student, teacher = logits(0, batch.loss_mask.shape).requires_grad_(), logits(1, batch.loss_mask.shape)
    labels = torch.where(batch.loss_mask, batch.completion_ids, -100)
    theirs = jsd(student, teacher, labels, beta=beta, temperature=temperature)
    plugin = Distill(Distill.Options(beta=beta, temperature=temperature))
    assert_same(ours(batch, plugin, student, teacher), theirs, student)
    if temperature == 1:
        plugin = OnPolicyDistill(OnPolicyDistill.Options(signal="full", beta=beta))
        assert_same(ours(batch, plugin, student, teacher), theirs, student)


def test_the_rest_of_the_weight_is_cross_entropy(batch, jsd):
    student, teacher = logits(0, batch.loss_mask.shape).requires_grad_(), logits(1, batch.loss_mask.shape)
    labels = torch.where(batch.loss_mask, batch.completion_ids, -100)
    nll = torch.nn.functional.cross_entropy(student.flatten(0, 1), labels.flatten())
    theirs = 0.3 * nll + 0.7 * jsd(student, teacher, labels, beta=0.0)
    assert_same(ours(batch, Distill(Distill.Options(alpha=0.7)), student, teacher), theirs, student)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_likeliest_tokens_and_one_for_the_rest_are_a_distribution_of_their_own(batch, jsd, beta):
    """The whole vocabulary of TRL's, in which the rest is one token: logits whose softmax is just that."""
    student, teacher = logits(0, batch.loss_mask.shape).requires_grad_(), logits(1, batch.loss_mask.shape)
    ids = teacher.topk(6).indices

    def bucketed(values):
        probabilities = values.softmax(-1)
        inside = probabilities.gather(-1, ids)
        return torch.cat([inside, 1 - inside.sum(-1, keepdim=True)], -1).log()

    labels = torch.where(batch.loss_mask, batch.completion_ids, -100)
    theirs = jsd(bucketed(student), bucketed(teacher), labels, beta=beta)
    plugin = Distill(Distill.Options(beta=beta, top_k=6))
    assert_same(ours(batch, plugin, student, teacher, top_k=6), theirs, student)
    kept = jsd(student.gather(-1, ids), teacher.gather(-1, ids), labels, beta=beta, temperature=2.0)
    plugin = Distill(Distill.Options(beta=beta, top_k=6, tail="renormalise", temperature=2.0))
    assert_same(ours(batch, plugin, student, teacher, top_k=6), kept, student)


def test_the_advantage_of_sampled_tokens_is_the_gradient_of_the_reverse_divergence_in_expectation():
    """By summing over every token that may be sampled, each with its probability."""
    student, teacher = logits(0, (1,)).requires_grad_(), logits(1, (1,))
    logs, theirs = student.log_softmax(-1)[0], teacher.log_softmax(-1)[0]
    reverse = (logs.exp() * (logs - theirs)).sum()
    advantages = (theirs - logs).detach()
    policy = -(logs.detach().exp() * advantages * logs).sum()
    (one,), (two,) = (torch.autograd.grad(loss, student, retain_graph=True) for loss in (policy, reverse))
    torch.testing.assert_close(one, two)
