"""PPO against hand-worked cases and a float64 loop over action tokens."""

import importlib.metadata
import inspect
import math

import pytest
import rlhf_plugin_ppo
import torch
from pydantic import ValidationError
from rlhf_authoring import algorithm_contract, make_batch
from rlhf_plugin_ppo import PPO, Options

from rlhf_host import LOSS, LossTerm, Metric, Output, Outputs

TestContract = algorithm_contract("ppo")
TestDiscounted = algorithm_contract("ppo", {"gamma": 0.9, "lam": 0.8, "lam_critic": 1.0, "bootstrap_truncated": True})


def with_values(batch, seed=0):
    """Values, shaping and bootstrap values that are all different."""
    generator = torch.Generator().manual_seed(seed)
    batch.values["critic"] = torch.randn(batch.action_mask.shape, generator=generator)
    batch.shaped = 0.1 * torch.randn(batch.action_mask.shape, generator=generator)
    batch.bootstrap["critic"] = torch.randn(len(batch), generator=generator)
    return batch


def compute(batch, **options):
    return PPO(Options(**options)).compute_advantages(batch)


def by_hand(batch, gamma, lam, bootstrap):
    """``A`` as a plain double sum of the definition, over a Python list of the row's action tokens; 0 elsewhere."""
    found = torch.zeros(batch.action_mask.shape, dtype=torch.float64)
    for row in range(len(batch)):
        places = [t for t in range(batch.action_mask.shape[1]) if batch.action_mask[row, t]]
        r = [float(batch.token_rewards[row, t].double() + batch.shaped[row, t].double()) for t in places]
        v = [float(batch.values["critic"][row, t]) for t in places]
        v.append(float(batch.bootstrap["critic"][row]) if bootstrap and batch.truncated[row] else 0.0)
        delta = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(places))]
        for i, t in enumerate(places):
            found[row, t] = math.fsum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(places)))
    return found


def metrics_of(items):
    return {item.name: item for item in items if isinstance(item, Metric)}


# --- advantages and returns ---------------------------------------------------------------------


@pytest.mark.parametrize("observations", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (1.0, 0.5), (0.9, 0.0)])
@pytest.mark.parametrize("bootstrap", [False, True])
def test_advantages_and_returns_are_those_of_a_float64_loop(observations, gamma, lam, bootstrap):
    batch = with_values(make_batch([7, 3, 1, 9], observations=observations, seed=4))
    batch.truncated[[0, 2]] = True
    expected = by_hand(batch, gamma, lam, bootstrap)
    found = compute(batch, gamma=gamma, lam=lam, whiten="none", bootstrap_truncated=bootstrap)
    mask = batch.action_mask
    torch.testing.assert_close(found.advantages.double(), expected, rtol=1e-5, atol=1e-6)
    returns = torch.where(mask, expected + batch.values["critic"].double(), 0.0)
    torch.testing.assert_close(found.returns.double(), returns, rtol=1e-5, atol=1e-6)


def test_hand_worked():
    """r = 0, 0, 1 and V = 0.5, 0.25, 0.75 with γ = 0.5, λ = 0.5: δ = −0.375, 0.125, 0.25; γλ = 0.25."""
    batch = make_batch([3], groups=[0], rewards=[1.0])
    batch.values["critic"] = torch.tensor([[0.5, 0.25, 0.75]])
    found = compute(batch, gamma=0.5, lam=0.5, whiten="none")
    assert found.advantages[0].tolist() == pytest.approx([-0.375 + 0.25 * 0.125 + 0.0625 * 0.25, 0.125 + 0.25 * 0.25, 0.25])
    assert found.returns[0].tolist() == pytest.approx([0.171875, 0.4375, 1.0])


def test_with_lambda_1_the_returns_are_the_rewards_to_come_whatever_the_critic_says():
    batch = make_batch([4, 4], groups=[0, 0], rewards=[2.0, -1.0])
    batch.values["critic"] = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    found = compute(batch, lam=0.3, lam_critic=1.0, whiten="none")
    torch.testing.assert_close(found.returns, torch.tensor([[2.0] * 4, [-1.0] * 4]))
    torch.testing.assert_close(found.advantages, compute(batch, lam=0.3, whiten="none").advantages)


def test_observations_are_no_steps_of_the_chain():
    """The same action tokens with observations between them have the same advantages and returns."""
    inside = with_values(make_batch([8, 5], observations=True, seed=2))
    rows = [inside.action_mask[row].nonzero().flatten() for row in range(2)]
    outside = make_batch([len(row) for row in rows], rewards=inside.rewards.tolist())
    outside.shaped, outside.values["critic"] = torch.zeros(outside.action_mask.shape), torch.zeros(outside.action_mask.shape)
    for row, places in enumerate(rows):
        outside.shaped[row, : len(places)] = inside.shaped[row, places]
        outside.values["critic"][row, : len(places)] = inside.values["critic"][row, places]
    options = {"gamma": 0.9, "lam": 0.8}
    found, plain = compute(inside, **options), compute(outside, **options)
    for row, places in enumerate(rows):
        for name in ("advantages", "returns"):
            torch.testing.assert_close(getattr(found, name)[row, places], getattr(plain, name)[row, : len(places)])


def test_what_lies_in_masked_places_changes_nothing():
    batch, dirty = (with_values(make_batch([7, 3, 5, 2], observations=True)) for _ in range(2))
    for name in ("token_rewards", "shaped"):
        setattr(dirty, name, getattr(dirty, name).where(dirty.action_mask, float("nan")))
    dirty.values["critic"] = dirty.values["critic"].where(dirty.action_mask, float("nan"))
    assert torch.equal(compute(dirty).advantages, compute(batch).advantages)
    assert torch.equal(compute(dirty).returns, compute(batch).returns)


def test_whitening_is_over_the_tokens_in_the_loss():
    batch = with_values(make_batch([6, 4, 5, 3], observations=True, seed=5))
    batch.loss_mask[1] = False
    raw = compute(batch, whiten="none").advantages.double()[batch.loss_mask]
    mean = math.fsum(raw.tolist()) / len(raw)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in raw.tolist()) / len(raw))
    full, center = (compute(batch, whiten=kind) for kind in ("full", "center"))
    torch.testing.assert_close(full.advantages.double()[batch.loss_mask], (raw - mean) / deviation, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(center.advantages.double()[batch.loss_mask], raw - mean, rtol=1e-5, atol=1e-6)
    assert torch.equal(full.returns, compute(batch, whiten="none").returns), "the critic's targets are not whitened"


def test_explained_variance():
    batch = make_batch([2, 2], groups=[0, 0], rewards=[1.0, 0.0])
    for values, expected in (
        ([[1.0, 1.0], [0.0, 0.0]], 1.0),
        ([[0.5, 0.5], [0.5, 0.5]], 0.0),
        ([[0.0, 0.0], [1.0, 1.0]], -3.0),
    ):
        batch.values["critic"] = torch.tensor(values)
        found = metrics_of(compute(batch).metrics)
        assert found["critic/explained_variance"].values == pytest.approx(expected)
    batch.token_rewards.zero_()
    assert "critic/explained_variance" not in metrics_of(compute(batch).metrics), "all returns are the same"


# --- losses -------------------------------------------------------------------------------------


def terms(plugin, role, batch, **outputs):
    return [item for item in plugin.compute_loss(role, Outputs(**outputs), batch) if isinstance(item, LossTerm)]


def test_value_clipping_hand_worked():
    """V_old = 0, ε = 0.5. G = 2: V = 0.4 moves freely, V = 1 is held at 0.5 and learns no more; V = −1 is worse than its
    clipped self, so it still learns. G = 0.2: V = 1 learns back."""
    batch = make_batch([4], groups=[0])
    batch.values["critic"] = torch.zeros(1, 4)
    batch.returns = torch.tensor([[2.0, 2.0, 2.0, 0.2]])
    values = torch.tensor([[0.4, 1.0, -1.0, 1.0]], requires_grad=True)
    plugin = PPO(Options(value_clip=0.5))
    items = plugin.compute_loss("critic", Outputs(values=values), batch)
    (term,) = [item for item in items if isinstance(item, LossTerm)]
    assert term.values[0].tolist() == pytest.approx([0.5 * 1.6**2, 0.5 * 1.5**2, 0.5 * 3.0**2, 0.5 * 0.8**2])
    term.values.sum().backward()
    assert values.grad[0].tolist() == pytest.approx([-1.6, 0.0, -3.0, 0.8])
    assert metrics_of(items)["clip_fraction"].values[0].tolist() == [0.0, 1.0, 0.0, 0.0]

    (free,) = terms(PPO(Options(value_clip=None)), "critic", batch, values=values)
    assert free.values[0].tolist() == pytest.approx([0.5 * 1.6**2, 0.5 * 1.0, 0.5 * 3.0**2, 0.5 * 0.8**2])


def test_the_value_loss_counts_the_tokens_of_the_policy_loss_and_is_not_corrected():
    batch = with_values(make_batch([3, 3, 3]))
    batch.loss_mask[1] = False  # a row that some mask took out: overlong, say
    found = compute(batch)
    batch.advantages, batch.returns = found.advantages, found.returns
    plugin = PPO(Options())
    (value,) = terms(plugin, "critic", batch, values=torch.zeros(3, 3))
    (policy,) = terms(plugin, "actor", batch, logprobs=batch.sampler_logprobs)
    assert value.mask == policy.mask == LOSS
    assert value.values[1].eq(0).all()
    assert policy.corrected
    assert not value.corrected


def test_every_role_has_terms_of_its_own():
    batch = with_values(make_batch([3, 3]))
    found = compute(batch)
    batch.advantages, batch.returns = found.advantages, found.returns
    plugin = PPO(Options(critic_warmup=2, entropy_coef=0.1))
    actor = {"logprobs": batch.sampler_logprobs, "entropy": torch.ones(2, 3)}
    assert [term.name for term in terms(plugin, "actor", batch, **actor)] == ["policy", "entropy"]
    assert [term.name for term in terms(plugin, "critic", batch, values=torch.zeros(2, 3))] == ["value"]
    assert plugin.compute_loss("reference", Outputs(), batch) == []


# --- what it asks of the host -------------------------------------------------------------------


def test_needs():
    needs = PPO(Options()).needs()
    actor, critic = needs.roles
    assert actor.trainable
    assert (critic.name, critic.head, critic.trainable, critic.source, critic.lr) == ("critic", "scalar", True, "actor", 1e-5)
    values = (Output("values"), Output("values", role="critic"))
    assert needs.outputs == values
    assert needs.min_group_size == 1
    more = PPO(Options(bootstrap_truncated=True, critic_from="reward", critic_warmup=1, entropy_coef=0.1)).needs()
    assert more.outputs == (Output("entropy"), *values, Output("bootstrap", role="critic"))
    assert more.roles[1].source == "reward"
    assert [role.idle_steps for role in more.roles] == [1, 0]


@pytest.mark.parametrize("wrong", [{"lam": 1.1}, {"gamma": -0.1}, {"value_clip": 0}, {"whiten": "yes"}, {"critic_warmup": -1}])
def test_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValidationError):
        Options(**wrong)


def test_the_plugin_is_small_and_found_by_its_entry_point():
    (entry,) = [e for e in importlib.metadata.entry_points(group="rlhf.algos") if e.name == "ppo"]
    assert entry.load() is PPO
    lines = [line for line in inspect.getsource(rlhf_plugin_ppo).splitlines() if line.strip()]
    assert len(lines) < 150
