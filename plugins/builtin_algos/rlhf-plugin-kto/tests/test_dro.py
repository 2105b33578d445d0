"""DRO against its formula in float64, gradients too; what its parts leave alone; and runs."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_authoring import make_batch
from rlhf_plugin_kto.dro import DRO, at_start

import rlhf_host
from rlhf_host import LossTerm, Outputs, UserError


def a_batch(lengths, rewards, seed=0, observations=False):
    """Single answers with a reward, and what other roles say of them; NaN where nothing counts."""
    batch = make_batch(lengths, groups=list(range(len(lengths))), seed=seed, observations=observations)
    random = torch.Generator().manual_seed(seed)
    batch.columns = {"reward": torch.tensor(rewards, dtype=torch.float32)}

    def made_up():
        values = torch.randn(batch.action_mask.shape, generator=random, dtype=torch.float64)
        return values.masked_fill(~batch.action_mask, math.nan)

    batch.logprobs, batch.values = {"reference": made_up(), "actor": made_up()}, {"critic": made_up()}
    return batch, made_up()


def loss_of(role, batch, values, tau):
    outputs = Outputs(logprobs=values) if role == "actor" else Outputs(values=values)
    items = DRO(DRO.Options(tau=tau)).compute_loss(role, outputs, batch)
    (term,) = [item for item in items if isinstance(item, LossTerm)]
    return term.values


def by_hand(role, batch, values, tau):
    """``½(r − V − τ·log(π/ref))²`` of each row, over τ for the policy, from scalars that keep their gradients."""
    losses = []
    for row, mask in enumerate(batch.loss_mask):
        places = [at for at in range(mask.shape[0]) if mask[at]]
        own = values if role == "actor" else batch.logprobs["actor"]
        ratio = sum(own[row, at] - batch.logprobs["reference"][row, at] for at in places)
        value = (values if role == "critic" else batch.values["critic"])[row, places[0]]
        loss = (batch.columns["reward"][row].double() - value - tau * ratio) ** 2 / 2
        losses.append(loss / tau if role == "actor" else loss)
    return torch.stack(losses)


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    tau=st.sampled_from([0.05, 0.5, 1.0, 5.0]),
    observations=st.booleans(),
    role=st.sampled_from(["actor", "critic"]),
)
def test_losses_and_gradients_are_those_of_the_formula(lengths, seed, tau, observations, role):
    batch, values = a_batch(lengths, [float((seed + row) % 5 - 2) for row in range(len(lengths))], seed, observations)
    values.requires_grad_()
    found, wanted = (of(role, batch, values, tau) for of in (loss_of, by_hand))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-8)
    one, other = (torch.autograd.grad(loss.sum(), values, retain_graph=True)[0] for loss in (found, wanted))
    torch.testing.assert_close(one.nan_to_num(), other.nan_to_num(), rtol=1e-6, atol=1e-8)
    assert not one[~batch.action_mask].nan_to_num().any()


def test_the_policys_gradient_is_that_of_the_paper():
    """``−(∇log π·(r − V) − τ/2·∇(log π/ref)²)``: a policy gradient and a squared KL, after the division by ``τ``."""
    batch, values = a_batch([3], [2.0])
    values.requires_grad_()
    (found,) = torch.autograd.grad(loss_of("actor", batch, values, 0.5).sum(), values)
    ratio = (values - batch.logprobs["reference"]).sum()
    above = 2.0 - batch.values["critic"][0, 0]
    (wanted,) = torch.autograd.grad(-(values.sum() * above - 0.25 * ratio**2), values)
    torch.testing.assert_close(found, wanted)


def test_both_are_at_rest_where_policy_and_value_explain_the_reward():
    """``π* ∝ ref·exp(r/τ)`` and ``V* = τ·log E_ref exp(r/τ)`` have no loss and no gradient (eq. 3 of the paper)."""
    tau, rewards = 0.7, torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    value = tau * (reference + rewards / tau).logsumexp(0)
    policy = (reference + rewards / tau - value / tau).unsqueeze(-1)
    batch = make_batch([1, 1, 1], groups=[0, 1, 2])
    batch.columns = {"label": rewards.float()}
    batch.logprobs = {"reference": reference.unsqueeze(-1), "actor": policy}
    batch.values = {"critic": value.expand(3, 1)}
    for role, values in (("actor", policy.clone()), ("critic", value.expand(3, 1).clone())):
        values.requires_grad_()
        loss = loss_of(role, batch, values, tau).sum()
        assert float(loss.detach()) == pytest.approx(0.0, abs=1e-10)
        assert torch.autograd.grad(loss, values)[0].abs().max() < 1e-5


def test_rows_without_tokens_have_no_value():
    mask = torch.tensor([[False, True, True], [False, False, False]])
    values = torch.tensor([[math.nan, 2.0, 3.0], [math.nan, math.nan, math.nan]])
    assert at_start(values, mask).tolist() == [2.0, 0.0]


def test_a_batch_without_rewards_is_an_error():
    batch, values = a_batch([2], [1.0])
    batch.columns = {}
    with pytest.raises(ValueError, match="neither a column 'reward' nor 'label'"):
        loss_of("actor", batch, values, 1.0)


# --- runs -----------------------------------------------------------------------------------------------------------------------

FIXED = {"algo": "dro_v", "actor.model": "quickstart", "train.threads": 1, "batch_size": 4, "train.steps": 6}


def train(run, rows, **more):
    rlhf_host.train(data=rows, run_dir=str(run), **{**FIXED, **more})
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["reward", "label"])
def test_a_run_learns_from_rated_answers(tmp_path, name):
    rows = [{"prompt": f"{a}+4=", "completion": f"{a + 4 + a % 2}", name: 1 - a % 2} for a in range(10, 26)]
    metrics = train(tmp_path / "run", rows, **{"actor.lr": 1e-4, "critic.lr": 1e-3})
    assert [row["step"] for row in metrics] == list(range(1, 7))
    assert all(row["grad_norm"] > 0 and row["critic/grad_norm"] > 0 for row in metrics)
    assert metrics[0]["rewards"] == pytest.approx(0.5, abs=0.5)


def test_answers_without_a_rating_are_refused(tmp_path):
    with pytest.raises(UserError, match="needs rated data"):
        train(tmp_path / "run", [{"prompt": "2+2=", "completion": "4"}] * 4)
