"""XPO and Nash-MD against TRL 1.9.2, the last with trainers for them, and against their papers in loops."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from rlhf_plugin_online_dpo.rivals import XPO, NashMD

from rlhf_host import Group, Outputs, Segment, Task, Trajectory
from rlhf_host.rollouts.experience import make_experience

from .conftest import _borrowed, _take_out
from .test_offline_losses import Rows

REWARDS = [(1.0, -0.5), (0.0, 0.25), (3.0, 2.0)]
"""Of the policy's answer and its rival's."""
LENGTHS = [(5, 3), (2, 6), (4, 4)]


@pytest.fixture(scope="session")
def trainers():
    with _borrowed("trl-1.9.2"):
        newer = _take_out(("trl",))
        try:
            xpo = importlib.import_module("trl.experimental.xpo.xpo_trainer").XPOTrainer
            nash = importlib.import_module("trl.experimental.nash_md.nash_md_trainer")
            return SimpleNamespace(xpo=xpo, nash=nash.NashMDTrainer, mixture=nash.GeometricMixtureWrapper)
        finally:
            _take_out(("trl",))
            sys.modules.update(newer)


def sampled(rewards=REWARDS):
    """Groups of two answers, and log-probabilities of policy and reference, ``[2, 6, 6]``: the policy's answers first."""
    generator = torch.Generator().manual_seed(1)
    table = torch.zeros(2, 6, 6, dtype=torch.float64)
    groups = []
    for number, (two, sizes) in enumerate(zip(rewards, LENGTHS, strict=True)):
        rows = []
        for sample, (reward, size) in enumerate(zip(two, sizes, strict=True)):
            table[:, sample * 3 + number, :size] = -3 * torch.rand(2, size, generator=generator, dtype=torch.float64) - 0.1
            segments = [Segment("prompt", [1]), Segment("action", [5] * size, [-1.0] * size, [0] * size)]
            name = f"group-{number}"
            rows.append(Trajectory(f"{name}-{sample}", name, Task("", index=number), segments, sample=sample, reward=reward))
        groups.append(Group(f"group-{number}", Task("", index=number), rows))
    return groups, table


def ours(plugin, groups, table):
    """The loss as a function of log-probabilities, ``[6, 6]``, reduced as the host does."""
    made = plugin.make_rows(groups)
    kept = [Group(group.group_id, group.task, [row for row in made if row.group_id == group.group_id]) for group in groups]
    batch = make_experience([group for group in kept if group.trajectories], {}, step=1, max_new_tokens=0, temperature=1.0)
    order = [row.sample * 3 + row.task.index for row in batch.trajectories]
    width = batch.loss_mask.shape[1]
    reference = table[1][order][:, :width]
    batch.columns = {name: values.double() for name, values in batch.columns.items()}
    batch.logprobs["reference"] = reference.masked_fill(~batch.loss_mask, float("nan"))
    rows = Rows(batch, batch.loss_mask, None, reference)
    reduced = rows.ours(lambda logprobs: plugin.compute_loss(Outputs(logprobs=logprobs), batch))
    return lambda logprobs: reduced(logprobs[order][:, :width])


@pytest.mark.parametrize(("here", "there"), [("sigmoid", "sigmoid"), ("ipo_sum", "ipo")])
@pytest.mark.parametrize("alpha", [0.0, 0.05])
def test_xpo_is_trls(trainers, same, here, there, alpha):
    groups, table = sampled()
    chosen = torch.tensor([one > two for one, two in REWARDS])
    trainer = SimpleNamespace(beta=0.3, alpha=alpha, args=SimpleNamespace(loss_type=there))

    def theirs(logprobs):
        logprobs = logprobs.where(table[0] != 0, 0.0)  # as its mask of padding makes them
        (mine, reference), (their_mine, their_reference) = logprobs.chunk(2), table[1].chunk(2)
        return trainers.xpo._compute_losses(trainer, mine, reference, their_reference, their_mine, chosen)[0]

    plugin = XPO(XPO.Options(beta=0.3, loss=here, alpha=alpha))
    same(ours(plugin, groups, table), theirs, table[0])


def test_xpo_leaves_out_pairs_of_ties_and_trl_takes_the_policys_answer_as_the_better(trainers, gradient):
    groups, table = sampled([(1.0, 1.0), *REWARDS[1:]])
    plugin = XPO(XPO.Options(beta=0.3, alpha=0.05))
    found = gradient(ours(plugin, groups, table), table[0])
    assert found[[0, 3]].abs().max() == 0
    assert found[[1, 2, 4, 5]].abs().max() > 0.01
    trainer = SimpleNamespace(beta=0.3, alpha=0.05, args=SimpleNamespace(loss_type="sigmoid"))
    chosen = torch.tensor([True, False, True])

    def theirs(logprobs):
        (mine, reference), (their_mine, their_reference) = logprobs.chunk(2), table[1].chunk(2)
        return trainers.xpo._compute_losses(trainer, mine, reference, their_reference, their_mine, chosen)[0]

    assert gradient(theirs, table[0])[[0, 3]].abs().max() > 0.01


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.7])
def test_nash_md_with_kl_token_is_trls(trainers, same, beta):
    groups, table = sampled()
    scores = torch.tensor(REWARDS, dtype=torch.float64)
    trainer = SimpleNamespace(beta=beta)

    def theirs(logprobs):
        logprobs = logprobs.where(table[0] != 0, 0.0)
        probability = torch.sigmoid(scores[:, 0] - scores[:, 1])
        return trainers.nash._compute_losses(trainer, logprobs[:3], table[1, :3], probability)[0]

    plugin = NashMD(NashMD.Options(beta=beta, kl="token"))
    # The probability is a float32 column of the batch.
    one, two = ours(plugin, groups, table), theirs
    value, their_value = one(table[0]), two(table[0])
    torch.testing.assert_close(value, their_value, rtol=1e-6, atol=1e-6)
    leaves = [table[0].clone().requires_grad_() for _ in range(2)]
    for leaf, loss in zip(leaves, (one, two), strict=True):
        loss(leaf).backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-6, atol=1e-6)
    assert leaves[1].grad.abs().max() > 1e-3


@pytest.mark.parametrize("preference", ["sigmoid", "order"])
def test_nash_mds_gradient_is_the_papers_with_the_log_ratio_of_the_whole_answer(gradient, preference):
    """``∇log π(y)·(P − ½ − τ·log(π(y)/μ(y)))``, from which TRL's differs: there a token has its own log-ratio alone."""
    groups, table = sampled([(1.0, 1.0), *REWARDS[1:]])
    expected = torch.zeros_like(table[0])
    for number, (one, two) in enumerate([(1.0, 1.0), *REWARDS[1:]]):
        order = 0.5 if one == two else float(one > two)
        preferred = order if preference == "order" else 1 / (1 + torch.exp(torch.tensor(two - one)).item())
        size = LENGTHS[number][0]
        ratio = sum(float(table[0, number, t] - table[1, number, t]) for t in range(size))
        for t in range(size):
            expected[number, t] = -(preferred - 0.5 - 0.3 * ratio) / 3
    plugin = NashMD(NashMD.Options(beta=0.3, preference=preference))
    torch.testing.assert_close(gradient(ours(plugin, groups, table), table[0]), expected, rtol=1e-5, atol=1e-6)


def test_the_mixture_is_trls(trainers):
    from rlhf_host.engines.mixed import MixedDecoder

    generator = torch.Generator().manual_seed(0)
    own, other = torch.randn(2, 4, 9, generator=generator, dtype=torch.float64)

    class Model(torch.nn.Module):
        def __init__(self, logits):
            super().__init__()
            self.logits = logits

        def forward(self):
            return SimpleNamespace(logits=self.logits.clone())

    wrapper = SimpleNamespace(model=Model(other), ref_model=Model(own), mixture_coef=0.3)
    theirs = trainers.mixture.forward.__wrapped__(wrapper).logits
    mixed = MixedDecoder(SimpleNamespace(ragged=True), SimpleNamespace(ragged=True), 0.3)._mixed(other, own)
    torch.testing.assert_close(mixed.log_softmax(-1), theirs)
