"""Process reward models against TRL 1.9.2, the last with a trainer for them: which tokens have labels, and the loss."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from rlhf_authoring.contracts.reinforce import manager_of
from rlhf_authoring.models import tiny_tokenizer
from rlhf_plugin_reward_model_training import ProcessRewardModel
from rlhf_rows.load_units import load_units
from rlhf_rows.source import group_of
from transformers.loss.loss_utils import ForTokenClassification

from rlhf_host import LossTerm, Outputs
from rlhf_host.config.schema import DataConfig, DataSource
from rlhf_host.rollouts.experience import apply_masks, make_experience
from rlhf_host.training.reduction import Denominators, token_weights

from .conftest import _borrowed, _take_out

ROWS = [
    {"prompt": "1+1 and 2+2?", "completions": ["1+1=2", "2+2=5", "so 7"], "labels": [True, False, False]},
    {"prompt": "what is it?", "completions": ["a long first step", "yes"], "labels": [True, True]},
    {"prompt": "q:", "completions": ["no"], "labels": [False]},
]


@pytest.fixture(scope="session")
def tokenize_row():
    with _borrowed("trl-1.9.2"):
        newer = _take_out(("trl",))
        try:
            return importlib.import_module("trl.experimental.prm.prm_trainer").PRMTrainer.tokenize_row
        finally:
            _take_out(("trl",))
            sys.modules.update(newer)


def theirs(tokenize_row, separator, last):
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = None  # which TRL puts before every prompt, whatever the tokenizer does
    return [tokenize_row(row, tokenizer, separator, None, None, last, False) for row in ROWS]


def ours(separator, last):
    """The batch of the same rows, as a run makes it."""
    plugin = ProcessRewardModel(ProcessRewardModel.Options(separator=separator, last_step_only=last))
    data = DataConfig(sources=[DataSource(path="rows")])
    units = load_units(
        data,
        kind="stepwise",
        split="train",
        tokenizer=tiny_tokenizer(),
        rows={"rows": ROWS},
        separator=plugin.needs().separator,
    )
    tasks = units.tasks().tasks
    groups = [group_of(units.sources["rows"][index], tasks[index], 0, str) for index in range(len(ROWS))]
    batch = make_experience(groups, {}, step=1, max_new_tokens=0, temperature=1.0)
    apply_masks(batch, manager_of(algo=plugin))
    return plugin, batch


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("separator", ["\n", " so "])
def test_process_reward_models_are_trained_as_in_trl(tokenize_row, separator, last):
    plugin, batch = ours(separator, last)
    expected = theirs(tokenize_row, separator, last)
    for row, features in enumerate(expected):
        prompt, length = list(batch.prompt_ids[row]), int(batch.lengths[row])
        assert [*prompt, *batch.completion_ids[row, :length].tolist()] == features["input_ids"]
        labels = batch.token_columns["step"].masked_fill(~batch.loss_mask, -100)[row, :length]
        assert [-100] * len(prompt) + labels.tolist() == features["labels"]

    width = max(len(features["labels"]) for features in expected)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(ROWS), width, 2, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.tensor([features["labels"] + [-100] * (width - len(features["labels"])) for features in expected])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda self: self)
        their_loss = ForTokenClassification(logits, labels, SimpleNamespace(num_labels=2))
    (their_gradient,) = torch.autograd.grad(their_loss, logits)

    # The two labels' logits give one score, ``z₁ − z₀``, at the token itself.
    score = logits[..., 1] - logits[..., 0]
    scores = torch.full(batch.loss_mask.shape, float("nan"), dtype=torch.float64)
    for row, prompt in enumerate(batch.prompt_ids):
        length = int(batch.lengths[row])
        scores = scores.index_put((torch.tensor(row), torch.arange(length)), score[row, len(prompt) : len(prompt) + length])
    items = plugin.compute_loss(Outputs(token_scores=scores), batch)
    (term,) = [item for item in items if isinstance(item, LossTerm)]
    weights = token_weights(term.aggregation, Denominators.of(batch).mask(term.mask), batch.group_id, batch.episode_id)
    our_loss = (weights * term.values).sum()
    (our_gradient,) = torch.autograd.grad(our_loss, logits)
    torch.testing.assert_close(our_loss, their_loss)
    torch.testing.assert_close(our_gradient, their_gradient)
    assert their_gradient.abs().max() > 1e-3


def test_soft_labels_are_the_expectation_over_hard_ones():
    plugin, batch = ours("\n", False)
    scores = torch.linspace(-2, 2, batch.loss_mask.numel(), dtype=torch.float64).view(batch.loss_mask.shape)

    def values(labels):
        batch.token_columns["step"] = labels
        items = plugin.compute_loss(Outputs(token_scores=scores), batch)
        return next(item.values for item in items if isinstance(item, LossTerm))

    soft = torch.where(batch.loss_mask, 0.3, float("nan")).double()
    hard = [torch.where(batch.loss_mask, label, float("nan")).double() for label in (0.0, 1.0)]
    torch.testing.assert_close(values(soft), 0.7 * values(hard[0]) + 0.3 * values(hard[1]))
