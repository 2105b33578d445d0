"""Training of reward models against hand-worked values."""

import importlib.metadata
import json
import math
import statistics

import pytest
import torch
from rlhf_authoring import write_tiny_model
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_reward_model_training import RewardModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import rlhf_host
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
        "scores/mean": [1.25, -2.0],
        "scores/square": [2.125, 5.0],
    }


def test_an_evaluation_gives_the_mean_and_deviation_that_are_saved():
    plugin = RewardModel(RewardModel.Options())
    assert not plugin.saved_config("actor")
    plugin.log_metrics(1, {"scores/mean": 9.0, "scores/square": 99.0})
    assert not plugin.saved_config("actor"), "training is no evaluation"
    scores = [2.0, -1.0, 0.5, -3.0]
    plugin.log_metrics(
        2, {"eval/scores/mean": statistics.fmean(scores), "eval/scores/square": statistics.fmean(s * s for s in scores)}
    )
    expected = {"mean": pytest.approx(statistics.fmean(scores)), "std": pytest.approx(statistics.pstdev(scores))}
    assert plugin.saved_config("actor") == expected
    assert plugin.saved_config("reference") is None
    again = RewardModel(RewardModel.Options())
    again.load_state_dict(plugin.state_dict())
    assert again.saved_config("actor") == expected
    plugin.log_metrics(3, {"eval/scores/mean": 1.0, "eval/scores/square": 1.0})
    assert plugin.saved_config("actor") == expected, "no deviation is 0"


def test_a_trained_model_has_the_statistics_of_its_scores_in_its_file(tmp_path):
    """The scores are those of transformers alone."""
    model = write_tiny_model(tmp_path / "tiny")
    rows = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": f"{n}"} for n in range(6)]
    fixed = {"train.threads": 1, "train.batch_size": 3, "train.steps": 2, "actor.lr": 1e-2, "eval.every": 2}
    data = {"data": rows, "eval.data": rows[:4], "algo": "rm", "model": model, "run_dir": str(tmp_path / "run")}
    rlhf_host.train(**data, **fixed)
    saved = tmp_path / "run" / "model"
    config = json.loads((saved / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(saved)
    judge = AutoModelForSequenceClassification.from_pretrained(saved)
    scores = []
    for row in rows[:4]:
        for name in ("chosen", "rejected"):
            ids = [*tokenizer(row["prompt"] + row[name], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            with torch.no_grad():
                scores.append(float(judge(input_ids=torch.tensor([ids])).logits[0, 0]))
    assert config["mean"] == pytest.approx(statistics.fmean(scores), abs=1e-5)
    assert config["std"] == pytest.approx(statistics.pstdev(scores), rel=1e-3)


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
