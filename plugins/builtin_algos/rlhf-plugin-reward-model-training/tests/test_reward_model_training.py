"""Training of reward models against hand-worked values."""

import importlib.metadata
import math

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_reward_model_training import RewardModel

from rlhf_host import LossTerm, Metric, Outputs

NAN = float("nan")


@pytest.fixture
def batch():
    """Two pairs, apart from each other."""
    batch = make_batch([3, 2, 1, 2])
    batch.unit_id = batch.episode_id = torch.tensor([0, 1, 0, 1])
    batch.columns["label"] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    return batch


SCORES = torch.tensor([2.0, -1.0, 0.5, -3.0])


def made(batch, **options):
    items = list(RewardModel(RewardModel.Options(**options)).compute_loss(Outputs(scores=SCORES), batch))
    metrics = {one.name: one.values.tolist() for one in items if isinstance(one, Metric)}
    return {one.name: one for one in items if isinstance(one, LossTerm)}, metrics


def softplus(x):
    return math.log1p(math.exp(x))


def test_the_loss_is_the_logistic_loss_of_the_scores(batch):
    terms, metrics = made(batch)
    assert terms.keys() == {"pairs"}
    assert terms["pairs"].values.tolist() == pytest.approx([softplus(-1.5), softplus(2), softplus(-1.5), softplus(2)])
    given = [1 / (1 + math.exp(-1.5)), 1 / (1 + math.exp(2))]
    assert metrics.pop("brier") == pytest.approx([(1 - p) ** 2 for p in given])
    assert metrics.pop("calibration_error") == pytest.approx(given)
    assert metrics == {
        "accuracy": [1.0, 0.0],
        "scores/margin": [1.5, -2.0],
        "scores/chosen": [2.0, -3.0],
        "scores/rejected": [0.5, -1.0],
    }


def test_a_margin_counts_for_the_pairs_that_have_one(batch):
    batch.columns["margin"] = torch.tensor([1.0, NAN, 1.0, NAN])
    assert made(batch)[0]["pairs"].values[:2].tolist() == pytest.approx([softplus(-0.5), softplus(2)])
    assert made(batch, margin="off")[0]["pairs"].values[:2].tolist() == pytest.approx([softplus(-1.5), softplus(2)])


def test_scores_are_centered_by_the_square_of_their_sum(batch):
    term = made(batch, center_rewards_coefficient=0.01)[0]["center"]
    assert term.coefficient == 0.01
    assert term.values.tolist() == pytest.approx([6.25, 16.0, 6.25, 16.0])


def test_needs_and_entry_point():
    needs = RewardModel(RewardModel.Options()).needs()
    assert (needs.data, needs.unit_rows, needs.rewards) == ("preference", True, False)
    assert [(role.name, role.head, role.trainable, role.lr) for role in needs.roles] == [("actor", "scalar", True, 1e-5)]
    assert [output.what for output in needs.outputs] == ["scores"]
    (entry,) = [e for e in importlib.metadata.entry_points(group="rlhf.algos") if e.name == "rm"]
    assert entry.load() is RewardModel
