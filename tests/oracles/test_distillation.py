"""Divergences of distillation against TRL's GKD: value and gradient by the student's logits, in float64."""

from __future__ import annotations

import importlib

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_distill import Distill, OnPolicyDistill
from rlhf_plugin_distill.other_vocabulary import Spans, measures, whole_loss

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


OTHER = 17
"""Tokens of another vocabulary, of which the first five are the student's last, in another order."""
ENDS, OTHER_ENDS = (1, 3, 4, 6), (2, 3, 5, 6)
"""Places where the tokens of both end together; the numbers are bytes too, so that TRL finds the same pieces."""


@pytest.fixture(scope="session")
def uld():
    """``uld(student, teacher, **settings)``: TRL's GOLD, of one row whose answer is all but its first and its last token."""
    with _borrowed("trl"):
        trainer = importlib.import_module("trl.experimental.gold.gold_trainer")

    class Config:
        uld_crossentropy_weight, uld_distillation_weight = 0.0, 1.0
        uld_student_temperature = uld_teacher_temperature = 1.0
        uld_skip_student_eos = uld_skip_teacher_eos = False
        use_extended_uld = True

        def __init__(self, settings):
            self.__dict__.update(settings)

    class Vocabulary:
        def __init__(self, names):
            self.names = names

        def get_vocab(self):
            return {name: number for number, name in enumerate(self.names)}

    own = [f"s{number}" for number in range(VOCABULARY)]
    other = [own[-1 - number] if number < 5 else f"t{number}" for number in range(OTHER)]

    def run(student, teacher, ids, other_ids, offsets, other_offsets, **settings):
        loss = trainer.ULDLoss(Config(settings), Vocabulary(own), Vocabulary(other))
        labels = [torch.cat([torch.tensor([[-100]]), each], 1) for each in (ids, other_ids)]
        inputs = [torch.cat([torch.tensor([[0]]), each], 1) for each in (ids, other_ids)]
        places = [torch.tensor([[(0, 0), *zip((0, *each), each, strict=False)]]) for each in (offsets, other_offsets)]
        return loss(student, teacher, *labels, *inputs, *places)

    return run


@pytest.mark.parametrize("merge", ["last", "first"])
@pytest.mark.parametrize("beta", [None, 0.1, 0.5, 0.9])
def test_pieces_of_text_in_two_vocabularies_are_compared_as_trl_does(uld, merge, beta):
    """TRL with each logit where its token is predicted: its first strategy reads them one place too late, which is why they are
    moved here; its second moves them itself. ``beta`` None: ULD alone.
    """
    student, teacher = (
        logits(0, (1, 6)).requires_grad_(),
        2 * torch.randn(1, 6, OTHER, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    )
    ids, other_ids = torch.arange(6)[None] * 3 % VOCABULARY, torch.arange(6)[None] * 5 % OTHER
    # Bytes where each token ends: both end together at 10, 20, 30 and 40.
    offsets, other_offsets = (10, 15, 20, 30, 35, 40), (4, 10, 20, 22, 30, 40)
    empty = [torch.zeros(1, 1, each.shape[-1], dtype=torch.float64) for each in (student, teacher)]
    both = [
        torch.cat([each, none] if merge == "last" else [none, each], 1)
        for each, none in zip((student, teacher), empty, strict=True)
    ]
    settings = {
        "uld_token_merge_strategy": "bayesian" if merge == "last" else "observed",
        "uld_use_hybrid_loss": beta is not None,
    }
    theirs = uld(*both, ids, other_ids, offsets, other_offsets, beta=beta, **settings)
    table = torch.zeros(1, 6, 3, dtype=torch.int64)
    for begin, end, low, high in zip((0, *ENDS), ENDS, (0, *OTHER_ENDS), OTHER_ENDS, strict=False):
        table[0, begin] = torch.tensor([end - begin, low, high - low])
    spans, logs = Spans.of(table), [each.log_softmax(-1) for each in (student, teacher)]
    of_tokens = [each.gather(-1, own.unsqueeze(-1)).squeeze(-1) for each, own in zip(logs, (ids, other_ids), strict=True)]
    mine = measures(logs[0], of_tokens[0], (spans.rows, spans.begin, spans.count), merge)[0]
    others = measures(logs[1], of_tokens[1], (spans.rows, spans.other_begin, spans.other_count), merge)[0]
    pairs = torch.tensor([(number, VOCABULARY - 1 - number) for number in range(5)])
    if beta is None:
        found = whole_loss(others, mine, pairs[:0], 0.5, (0.0, 1.0))[0]
    else:
        found = whole_loss(others, mine, pairs, beta, (5 / OTHER, 1 - 5 / OTHER))[0]
    assert_same(found.mean(), theirs, student)
