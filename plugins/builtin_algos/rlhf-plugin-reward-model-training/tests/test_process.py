"""Training of process reward models against hand-worked values."""

import importlib.metadata
import math

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_reward_model_training import ProcessRewardModel

from rlhf_host import LossTerm, Metric, Output, Outputs

NAN = float("nan")


@pytest.fixture
def batch():
    """Two rows: steps end at the second and fourth token of one, and at the third of the other."""
    batch = make_batch([4, 3])
    batch.token_columns["step"] = torch.tensor([[NAN, 1.0, NAN, 0.0], [NAN, NAN, 0.25, 0.0]])  # at padding 0
    return batch


SCORES = torch.tensor([[9.0, 2.0, 9.0, 0.5], [9.0, 9.0, -1.0, NAN]])


def made(batch, **options):
    plugin = ProcessRewardModel(ProcessRewardModel.Options(**options))
    batch.loss_mask = batch.action_mask & plugin.loss_masks(batch)
    items = list(plugin.compute_loss(Outputs(token_scores=SCORES), batch))
    metrics = {one.name: one.values[one.mask].tolist() for one in items if isinstance(one, Metric)}
    (term,) = [one for one in items if isinstance(one, LossTerm)]
    return term.values[batch.loss_mask].tolist(), metrics


def softplus(x):
    return math.log1p(math.exp(x))


def test_each_step_is_a_judgement_at_its_separator_with_hard_or_soft_labels(batch):
    values, metrics = made(batch)
    assert values == pytest.approx([softplus(-2), softplus(0.5), 0.25 * softplus(1) + 0.75 * softplus(-1)])
    given = [1 / (1 + math.exp(-score)) for score in (2, 0.5, -1)]
    assert metrics.pop("brier") == pytest.approx(
        [(p - label) ** 2 for p, label in zip(given, (1, 0, 0.25), strict=True)], rel=1e-5
    )
    assert metrics.pop("calibration_error") == pytest.approx([given[0], 1 - given[1]])  # a soft label is no outcome
    assert metrics == {"accuracy": [1.0, 0.0, 1.0], "scores/right": [2.0], "scores/wrong": [0.5, -1.0]}


def test_the_last_step_alone_may_count(batch):
    assert made(batch, last_step_only=True)[0] == pytest.approx([softplus(0.5), 0.25 * softplus(1) + 0.75 * softplus(-1)])


def test_other_data_is_an_error(batch):
    del batch.token_columns["step"]
    with pytest.raises(ValueError, match="no token column 'step': train on stepwise data"):
        made(batch)


@pytest.mark.parametrize("options", [{"separator": ""}, {"last_step_only": "sometimes"}, {"seperator": "\n"}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ProcessRewardModel.Options(**options)


def test_needs_and_entry_point():
    needs = ProcessRewardModel(ProcessRewardModel.Options(separator="END")).needs()
    assert (needs.data, needs.rewards, needs.separator) == ("stepwise", False, "END")
    assert [(role.name, role.head, role.trainable, role.lr) for role in needs.roles] == [("actor", "scalar", True, 1e-5)]
    assert needs.outputs == (Output("token_scores"),)
    (entry,) = [e for e in importlib.metadata.entry_points(group="rlhf.algos") if e.name == "prm"]
    assert entry.load() is ProcessRewardModel
