"""The KL extension's controller: it follows its target, ignores what is not finite, and survives a checkpoint."""

import pytest

from rlhf_host.config.schema import KLConfig
from rlhf_host.extensions.kl import KL
from rlhf_host.testing.tensors import make_batch


def controlled(**options):
    kl = KL(KLConfig(coef=0.1, controller="adaptive", target=0.02, horizon=100, **options))
    batch = make_batch([3, 4, 2, 5])
    batch.logprobs = {"actor": batch.sampler_logprobs, "reference": batch.sampler_logprobs - 0.5}
    return kl, batch


def test_the_reward_is_minus_coef_times_k1_on_action_tokens():
    kl, batch = controlled()
    shaped = kl.shape_rewards(batch)
    assert shaped[batch.action_mask].tolist() == pytest.approx([-0.05] * int(batch.action_mask.sum()))
    assert batch.extra["kl"]["coef"] == 0.1


@pytest.mark.parametrize(
    ("measured", "factor"), [(0.02, 1.0), (0.021, 1 + 0.05 * 4 / 100), (9.0, 1 + 0.2 * 4 / 100), (0.0, 1 - 0.2 * 4 / 100)]
)
def test_the_adaptive_coefficient_follows_its_formula(measured, factor):
    kl, batch = controlled()
    kl.shape_rewards(batch)
    kl.step_finished({"kl": measured})
    assert kl.coef == pytest.approx(0.1 * factor)


def test_a_step_without_a_finite_kl_leaves_it_alone():
    kl, batch = controlled()
    kl.shape_rewards(batch)
    kl.step_finished({"kl": float("nan")})
    kl.step_finished({})
    assert kl.coef == 0.1


def test_state_round_trips_between_rollout_and_step():
    kl, batch = controlled()
    kl.shape_rewards(batch)
    kl.coef = 0.3
    other, _ = controlled()
    other.load_state_dict(kl.state_dict())
    for one in (kl, other):
        one.step_finished({"kl": 9.0})
    assert other.coef == kl.coef > 0.3
