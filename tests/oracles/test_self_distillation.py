"""SDPO against TRL's: losses, gradients by the student's logits, and the prompts of teachers."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_distill import SDPO
from rlhf_plugin_distill.prompts import Hints, hinted

from rlhf_host import Distribution, LossTerm, Outputs
from rlhf_host.training.reduction import Denominators, Reducer

from .conftest import _borrowed

VOCABULARY = 23
SEQUENCES = "sequence-mean-token-mean"


@pytest.fixture(scope="session")
def sdpo():
    with _borrowed("trl"):
        return importlib.import_module("trl.experimental.sdpo.sdpo_trainer")


@pytest.fixture
def batch():
    batch = make_batch((5, 7, 3, 6), observations=True)
    batch.prompts = {"teacher": [[3, *ids] for ids in batch.prompt_ids]}
    return batch


def logits(seed, batch, spread=2.0):
    random = torch.Generator().manual_seed(seed)
    return spread * torch.randn(*batch.loss_mask.shape, VOCABULARY, generator=random, dtype=torch.float64)


def ours(batch, options, student, teacher):
    plugin = SDPO(SDPO.Options(aggregation=SEQUENCES, **options))
    batch.extra["sdpo"] = batch.own = plugin.prepare_batch(batch)
    theirs, own = teacher.log_softmax(-1), student.log_softmax(-1)
    at = batch.completion_ids.unsqueeze(-1)
    batch.logprobs["teacher"] = theirs.gather(-1, at).squeeze(-1)
    logprobs, ids = own.gather(-1, at).squeeze(-1), None
    if top := options.get("top_k"):
        ids = theirs.topk(top).indices
        theirs, own = theirs.gather(-1, ids), own.gather(-1, ids)
    outputs = Outputs(logprobs=logprobs, others={"teacher": Distribution(theirs, own, ids)})
    [term] = [item for item in plugin.compute_loss(outputs, batch) if isinstance(item, LossTerm)]
    weights = Reducer(Denominators.of(batch))
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):  # the host reduces in float32
        return weights.reduce(term, list(range(len(batch))), None, "sdpo")


def theirs(module, batch, student, teacher, **settings):
    args = SimpleNamespace(
        **{"distillation_topk": None, "distillation_add_tail": False, "distillation_is_clip": 2.0} | settings
    )
    trainer = mock.MagicMock(args=args)
    both = module.DistillationLogits(
        completion_ids=batch.completion_ids,
        completion_mask=batch.completion_mask.long(),
        loss_mask=batch.loss_mask.double(),
        student_logits=student,
        teacher_logits=teacher,
    )
    old = {"old_per_token_logps": batch.old_logprobs}
    return module.SDPOTrainer._compute_self_distillation_loss(trainer, mock.MagicMock(), old, both)


def assert_same(one, two, student):
    (value, gradient), (other, wanted) = (
        (loss, torch.autograd.grad(loss, student, retain_graph=True)[0]) for loss in (one, two)
    )
    torch.testing.assert_close(value.double(), other, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-7)
    assert gradient.abs().max() > 1e-4


SAMPLED, FULL = "sampled_token", "full_logits"


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {"distillation_mode": SAMPLED, "distillation_alpha": 1.0}),
        ({"signal": "full", "beta": 1.0}, {"distillation_mode": FULL, "distillation_alpha": 1.0}),
        ({"signal": "full", "beta": 0.0}, {"distillation_mode": FULL, "distillation_alpha": 0.0}),
        ({"signal": "full", "beta": 0.5}, {"distillation_mode": FULL, "distillation_alpha": 0.5}),
        ({"signal": "full", "beta": 0.3}, {"distillation_mode": FULL, "distillation_alpha": 0.3}),
    ],
)
def test_self_distillation_is_that_of_trl(sdpo, batch, options, settings, old):
    student, teacher = logits(0, batch).requires_grad_(), logits(1, batch)
    if old:
        at = batch.completion_ids.unsqueeze(-1)
        batch.old_logprobs = (student + 0.7 * logits(2, batch)).detach().log_softmax(-1).gather(-1, at).squeeze(-1)
    assert_same(ours(batch, options, student, teacher), theirs(sdpo, batch, student, teacher, **settings), student)


@pytest.mark.parametrize(("tail", "add"), [("bucket", True), ("renormalise", False)])
def test_the_likeliest_tokens_are_the_teachers_as_with_trls_server(sdpo, batch, tail, add):
    """TRL's trainer without a server compares the student's likeliest tokens."""
    student, teacher = logits(0, batch).requires_grad_(), logits(1, batch)
    ids = teacher.topk(6).indices
    both = [values.log_softmax(-1).gather(-1, ids) for values in (student, teacher)]
    both = [sdpo.add_tail_bucket(logs) if add else logs.log_softmax(-1) for logs in both]
    values = sdpo.compute_divergence(*both, 0.5)
    wanted = ((values * batch.loss_mask).sum(-1) / batch.loss_mask.sum(-1)).mean()
    assert_same(ours(batch, {"signal": "full", "beta": 0.5, "top_k": 6, "tail": tail}, student, teacher), wanted, student)


def test_trl_counts_rows_without_a_hint_in_the_denominator(sdpo, batch):
    student, teacher = logits(0, batch).requires_grad_(), logits(1, batch)
    batch.prompts["teacher"][1] = batch.prompt_ids[1]
    mine = ours(batch, {}, student, teacher)
    batch.loss_mask[1] = False
    other = theirs(sdpo, batch, student, teacher, distillation_mode=SAMPLED, distillation_alpha=1.0)
    assert_same(mine * 3 / 4, other, student)


@pytest.mark.parametrize(("solution", "feedback"), [("17", ""), ("", "wrong {sum}"), ("{1}7", "off by ten")])
@pytest.mark.parametrize("prompt", ["8+9=", [{"role": "system", "content": "Add."}, {"role": "user", "content": "8+9="}]])
def test_teachers_read_what_those_of_trl_read(sdpo, prompt, solution, feedback):
    config = importlib.import_module("dataclasses").fields(sdpo.SDPOConfig)
    texts = {field.name: field.default for field in config if field.name.endswith("_template")}
    solved = texts["solution_template"].format(successful_previous_attempt=solution) if solution else ""
    told = texts["feedback_template"].format(feedback_raw=feedback) if feedback else ""
    wanted = texts["reprompt_template"].format(prompt="8+9=", solution=solved, feedback=told)
    mine = hinted(prompt, Hints(solution, feedback), SDPO.Options())
    assert (mine if isinstance(mine, str) else mine[-1]["content"]) == wanted
    assert isinstance(mine, str) or mine[0] == {"role": "system", "content": "Add."}
