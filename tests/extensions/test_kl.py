"""The KL extension's controller: it follows its target, ignores what is not finite, and survives a checkpoint."""

import json

import pytest
import torch
from rlhf_authoring.tensors import make_batch

from rlhf_host.errors import UserError
from rlhf_host.extensions.kl import KL
from rlhf_host.records.tensors import LossTerm, Outputs
from rlhf_host.training.reduction import Denominators, Reducer, reduced


def controlled(**options):
    kl = KL(KL.Options(coef=0.1, controller="adaptive", target=0.02, horizon=100, **options))
    batch = make_batch([3, 4, 2, 5])
    batch.logprobs = {"actor": batch.sampler_logprobs, "reference": batch.sampler_logprobs - 0.5}
    return kl, batch


def test_the_reward_is_minus_coef_times_k1_on_action_tokens():
    kl, batch = controlled()
    shaped = kl.shape_rewards(batch)
    assert shaped[batch.action_mask].tolist() == pytest.approx([-0.05] * int(batch.action_mask.sum()))
    assert kl.prepare_batch(batch) == {"coef": 0.1}


@pytest.mark.parametrize(
    ("measured", "factor"), [(0.02, 1.0), (0.021, 1 + 0.05 * 4 / 100), (9.0, 1 + 0.2 * 4 / 100), (0.0, 1 - 0.2 * 4 / 100)]
)
def test_the_adaptive_coefficient_follows_its_formula(measured, factor):
    kl, batch = controlled()
    kl.prepare_batch(batch)
    kl.step_finished(1, {"kl": measured})
    assert kl.coef == pytest.approx(0.1 * factor)


def test_a_step_without_a_finite_kl_leaves_it_alone():
    kl, batch = controlled()
    kl.prepare_batch(batch)
    kl.step_finished(1, {"kl": float("nan")})
    kl.step_finished(2, {})
    assert kl.coef == 0.1


def test_the_kl_it_follows_is_that_of_the_policy_that_sampled():
    """Updates of the same batch move the policy: the controller would follow its own learning rate."""
    kl, batch = controlled()
    batch.own = kl.prepare_batch(batch)
    batch.old_logprobs = batch.logprobs["reference"] + 0.02
    moved = Outputs(logprobs=batch.logprobs["reference"] + 0.9)
    assert reduced(kl.compute_loss(moved, batch))["kl"] == pytest.approx(0.02, abs=1e-6)
    batch.old_logprobs = None  # one update: the policy of this forward is the one that sampled
    assert reduced(kl.compute_loss(moved, batch))["kl"] == pytest.approx(0.9, abs=1e-5)


def test_its_coefficient_can_be_adjusted_and_nothing_else():
    kl, batch = controlled()
    kl.adjust({"coef": 0.02})
    assert kl.prepare_batch(batch) == {"coef": 0.02}
    other, _ = controlled()
    other.load_state_dict(kl.state_dict())
    assert other.coef == 0.02
    for wrong in ({"target": 1.0}, {"coef": -0.1}):
        with pytest.raises(UserError, match="only coef can be adjusted, to 0 or more"):
            kl.adjust(wrong)


def test_state_round_trips_between_rollout_and_step():
    kl, batch = controlled()
    kl.prepare_batch(batch)
    kl.coef = 0.3
    other, _ = controlled()
    other.load_state_dict(kl.state_dict())
    for one in (kl, other):
        one.step_finished(1, {"kl": 9.0})
    assert other.coef == kl.coef > 0.3


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum-over(8)"])
def test_the_loss_term_is_averaged_as_kl_aggregation_says(aggregation):
    """Lengths 1 and 3, k2 of a constant gap of 0.4 in the first row and 0.2 in the second: 0.08 and 0.02 a token."""
    kl = KL(KL.Options(coef=0.5, place="loss", estimator="k2", aggregation=aggregation))
    batch = make_batch([1, 3])
    gap = torch.tensor([[0.4], [0.2]])
    batch.logprobs = {"reference": torch.where(batch.action_mask, batch.sampler_logprobs - gap, 0.0)}
    batch.own = kl.prepare_batch(batch)
    (term,) = (item for item in kl.compute_loss(Outputs(logprobs=batch.sampler_logprobs), batch) if isinstance(item, LossTerm))
    rows = list(range(len(batch)))
    loss = float(Reducer(Denominators.of(batch)).reduce(term, rows, None))
    expected = {
        "token-mean": (0.08 + 3 * 0.02) / 4,
        "sequence-mean-token-mean": (0.08 + 0.02) / 2,
        "sequence-mean-token-sum-over(8)": (0.08 + 3 * 0.02) / 2 / 8,
    }[aggregation]
    assert loss == pytest.approx(0.5 * expected, rel=1e-5)


def test_an_unknown_aggregation_is_refused_at_the_door(rlhf_here, small_run):
    result = rlhf_here(*small_run, "--kl.coef", "0.1", "--kl.place", "loss", "--kl.aggregation", "token-sum", "--dry-run")
    assert result.exit_code == 2
    assert "--kl.aggregation: aggregation is one of token-mean, " in result.output


def test_the_default_keeps_runs_as_they_were(rlhf_here, small_run, tmp_path):
    """An algorithm's own aggregation does not move the KL term: only kl.aggregation does."""
    found = {}
    for name, flags in {
        "default": (),
        "algo": ("--algo.aggregation", "sequence-mean-token-mean"),
        "kl": ("--kl.aggregation", "sequence-mean-token-sum"),
    }.items():
        kl = ("--kl.coef", "0.1", "--kl.place", "loss", "--train.epochs", "2", "--train.steps", "1")
        result = rlhf_here(*small_run, *kl, "--run-dir", tmp_path / name, *flags)
        assert result.exit_code == 0, result.output
        found[name] = json.loads((tmp_path / name / "metrics.jsonl").read_text())["loss/kl"]
    assert found["algo"] == pytest.approx(found["default"], rel=0.2)
    assert found["kl"] > 2 * found["default"] > 0
