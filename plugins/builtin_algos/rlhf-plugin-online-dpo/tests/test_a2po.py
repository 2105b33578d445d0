"""A*-PO: the value of a prompt, the regression in float64, who answers what, and what is refused."""

from __future__ import annotations

import json
import math
from decimal import Decimal, getcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_plugin_online_dpo.a2po import A2PO, optimal_value

import rlhf_host
from rlhf_host import Drop, Group, LossTerm, Metric, Outputs, Segment, Task, Trajectory, UserError
from rlhf_host.rollouts.experience import make_experience

DATA = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in ((17, 35), (38, 26), (41, 29), (56, 17))]
FIXED = {"train.threads": 1, "actor.model": "quickstart", "rollout.max_new_tokens": 4, "n": 4, "batch_size": 4, "steps": 3}


def group(*rewards, name="a"):
    def row(sample, reward):
        segments = [Segment("prompt", [1]), Segment("action", [10 + sample] * 2, [-1.0] * 2, [0] * 2)]
        return Trajectory(f"{name}-{sample}", name, Task(""), segments, sample=sample, reward=reward)

    return Group(name, Task(""), [row(*each) for each in enumerate(rewards)])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=1, max_size=9), st.sampled_from([1e-3, 0.1, 0.5, 1.0, 1e3]))
def test_the_value_is_a_soft_maximum_of_the_references_rewards(rewards, beta):
    getcontext().prec = 60
    scale = Decimal(beta)
    exact = scale * (sum((Decimal(reward) / scale).exp() for reward in rewards) / len(rewards)).ln()
    assert optimal_value(rewards, beta) == pytest.approx(float(exact), rel=1e-6, abs=1e-6)
    assert min(rewards) - 1e-9 <= optimal_value(rewards, beta) <= max(rewards) + 1e-9


def test_the_value_of_equal_rewards_is_that_reward_and_large_ones_do_not_overflow():
    assert optimal_value([0.1] * 8, 0.5) == 0.1
    assert optimal_value([1e6, 0.0], 0.5) == pytest.approx(1e6 - 0.5 * math.log(2))


@settings(max_examples=40, deadline=None)
@given(
    rewards=st.lists(st.lists(st.integers(0, 1).map(float), min_size=2, max_size=6), min_size=1, max_size=4),
    beta=st.sampled_from([1e-3, 0.1, 1.0]),
    beta_value=st.sampled_from([0.1, 0.5, 2.0]),
    seed=st.integers(0, 99),
)
def test_losses_and_gradients_are_those_of_the_formula(rewards, beta, beta_value, seed):
    """``(β₂·Σ(log π − log ref) − (r − β₁·log mean exp(r/β₁)))²`` of the policy's answer of each prompt."""
    plugin = A2PO(A2PO.Options(beta=beta, beta_value=beta_value))
    groups = [group(*own, name=f"g{number}") for number, own in enumerate(rewards)]
    made = plugin.make_rows(groups)
    assert [(row.group_id, row.sample) for row in made] == [(one.group_id, 0) for one in groups]
    whole = [Group(row.group_id, row.task, [row]) for row in made]
    batch = make_experience(whole, {}, step=1, max_new_tokens=8, temperature=1.0)
    random = torch.Generator().manual_seed(seed)
    own, reference = (torch.randn(batch.loss_mask.shape, generator=random, dtype=torch.float64) for _ in range(2))
    own.requires_grad_()
    batch.logprobs["reference"] = reference
    items = plugin.compute_loss(Outputs(logprobs=own), batch)
    (term,) = [item for item in items if isinstance(item, LossTerm)]
    wanted = []
    for row, (first, *others) in enumerate(rewards):
        value = beta_value * math.log(sum(math.exp(reward / beta_value) for reward in others) / len(others))
        wanted.append((beta * (own[row] - reference[row]).sum() - (first - value)) ** 2)
    torch.testing.assert_close(term.values.double(), torch.stack(wanted), rtol=1e-5, atol=1e-6)
    found, expected = (torch.autograd.grad(of.sum(), own, retain_graph=True)[0] for of in (term.values, torch.stack(wanted)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert {item.name for item in items if isinstance(item, Metric)} == {"value", "optimal_advantage", "kl_reference"}


def test_it_is_at_rest_at_the_optimal_policy():
    """``π* ∝ ref·exp(r/β)``, with one temperature and the exact value: the regression has no residual for any answer."""
    beta, rewards = 0.3, [1.0, 0.0, 1.0, 0.5]
    reference = torch.full((4,), 0.25, dtype=torch.float64).log()
    value = optimal_value(rewards, beta)
    policy = reference + (torch.tensor(rewards, dtype=torch.float64) - value) / beta
    assert float(policy.exp().sum()) == pytest.approx(1.0)
    plugin = A2PO(A2PO.Options(beta=beta, beta_value=beta))
    for number, reward in enumerate(rewards):
        made = plugin.make_rows([group(reward, *rewards)])
        batch = make_experience([Group("a", Task(""), made)], {}, step=1, max_new_tokens=8, temperature=1.0)
        batch.logprobs["reference"] = torch.tensor([[float(reference[number]), 0.0]], dtype=torch.float64)
        own = torch.tensor([[float(policy[number]), 0.0]], dtype=torch.float64)
        assert float(plugin.compute_loss(Outputs(logprobs=own), batch)[0].values) == pytest.approx(0.0, abs=1e-10)


def test_prompts_without_a_value_are_dropped():
    plugin = A2PO(A2PO.Options())
    assert plugin.keep_group(group(None, 1.0)) == Drop("no_value")
    assert plugin.keep_group(group(1.0, None)) == Drop("no_value")
    assert plugin.keep_group(group(1.0, 0.0, 0.0)) == Drop("hopeless")
    assert plugin.keep_group(group(0.0, 0.0, None, 1.0)) is True
    assert A2PO(A2PO.Options(filter_hopeless=False)).keep_group(group(1.0, 0.0)) is True
    assert plugin.make_rows([group(None, 1.0)]) == []


# --- runs -----------------------------------------------------------------------------------------------------------------------


def length(text, label):
    return sum(map(ord, text)) / 100


def train(run, **more):
    settings = {"algo": "a2po", "agent": "a2po", "data": DATA, "reward": length, "lr": 1e-4}
    rlhf_host.train(run_dir=str(run), **{**FIXED, **settings, **more})
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_trains_on_the_policys_answers_alone(tmp_path):
    metrics = train(tmp_path / "run")
    assert all(row["grad_norm"] > 0 and row["rows/count"] == 4 and row["mismatch/max"] < 1e-4 for row in metrics)
    assert metrics[0]["kl_reference"] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"agent": "single_turn"}, "add agent a2po"),
        ({"n": 1}, "rollout.n"),
        ({"algo": {"name": "a2po", "beta": 0}}, "beta"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, more, said):
    with pytest.raises(UserError, match=said):
        train(tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()
