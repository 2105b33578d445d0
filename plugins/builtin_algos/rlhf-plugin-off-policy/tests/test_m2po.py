"""M2PO against a loop that takes the tokens out one by one."""

import math

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_off_policy.m2po import M2PO

from rlhf_host import Outputs, UserError
from rlhf_host import functional as F
from rlhf_host.internals import Denominators, Reducer


def looped(squares, threshold):
    """The tokens that stay: the largest goes until the mean is within the threshold."""
    left = sorted(range(len(squares)), key=lambda place: squares[place])
    while left and sum(squares[place] for place in left) / len(left) > threshold:
        left.pop()
    return set(left)


@pytest.mark.parametrize("threshold", [1e-4, 0.04, 0.3, 1e3])
def test_the_largest_go_until_the_second_moment_is_within_the_threshold(threshold):
    batch = make_batch([5, 7, 3, 6], observations=True)
    random = torch.Generator().manual_seed(3)
    gap = 0.6 * torch.randn(batch.action_mask.shape, generator=random, dtype=torch.float64)
    batch.logprobs["actor"] = (batch.sampler_logprobs.double() + gap).float()
    plugin = M2PO(M2PO.Options(threshold=threshold))
    kept = plugin.prepare_batch(batch)["kept"]
    places = batch.loss_mask.nonzero().tolist()
    squares = [float(batch.logprobs["actor"][row, t] - batch.sampler_logprobs[row, t]) ** 2 for row, t in places]
    expected = {tuple(places[place]) for place in looped(squares, threshold)}
    assert {tuple(place) for place in (kept & batch.loss_mask).nonzero().tolist()} == expected
    assert kept[~batch.loss_mask].all()
    batch.own = {"kept": kept}
    assert torch.equal(plugin.importance_weights(batch), kept.float())
    [metric] = plugin.compute_loss(Outputs(), batch)
    assert float(metric.values[metric.mask].mean()) == pytest.approx(1 - len(expected) / len(places))


def test_tokens_that_nothing_sampled_stay_and_are_not_in_the_moment():
    batch = make_batch([6, 6])
    batch.logprobs["actor"] = batch.sampler_logprobs + torch.tensor([0.1, 0.2, 0.5, 0.1, 0.3, 0.2])
    plugin = M2PO(M2PO.Options(threshold=0.03))
    batch.sampler_logprobs[0] = batch.sampler_logprobs[1, 3] = float("nan")
    kept = plugin.prepare_batch(batch)["kept"]
    assert kept[0].all()
    # 0.01, 0.04, 0.04 have a mean of 0.03, and 0.09 would make it 0.045.
    assert kept[1].tolist() == [True, True, False, True, False, True]


def test_the_loss_is_the_papers_without_a_clip():
    """``−Σ M·ρ·A / Σ|o|`` (arXiv:2510.01161): as plain numbers, and its gradient ``−M·ρ·A / Σ|o|``."""
    batch = make_batch([5, 7, 3], observations=True)
    random = torch.Generator().manual_seed(3)
    gap = torch.randn(batch.action_mask.shape, generator=random)  # far beyond any clip
    batch.advantages = torch.randn(batch.action_mask.shape, generator=random)
    batch.old_logprobs = batch.sampler_logprobs - gap
    batch.logprobs["actor"] = torch.where(batch.action_mask, batch.sampler_logprobs + 0.3 * gap, 0.0)
    batch.own = M2PO(M2PO.Options(threshold=0.02)).prepare_batch(batch)
    logprobs = batch.sampler_logprobs.clone().requires_grad_()
    term, *_ = F.policy_loss(Outputs(logprobs=logprobs), batch, F.PolicyLossOptions(loss="ratio"))
    term.values = term.values * M2PO(M2PO.Options()).importance_weights(batch)
    loss = Reducer(Denominators.of(batch)).reduce(term, [0, 1, 2], None)
    loss.backward()
    count, wanted = int(batch.action_mask.sum()), torch.zeros(batch.action_mask.shape, dtype=torch.float64)
    for row, t in (batch.action_mask & batch.own["kept"]).nonzero().tolist():
        wanted[row, t] = -math.exp(float(gap[row, t])) * float(batch.advantages[row, t]) / count
    assert loss.item() == pytest.approx(float(wanted.sum()), rel=1e-5)
    assert torch.allclose(logprobs.grad.double(), wanted, rtol=1e-4, atol=1e-7)
    assert (~batch.own["kept"]).any()


@pytest.mark.parametrize(
    ("algo", "said"),
    [
        ({"name": "grpo", "loss": "clip", "clip_eps": 0.2}, "algo.loss clip has one"),
        ({"name": "grpo", "loss": "gspo", "clip_eps": 0.2}, "algo.loss gspo has one"),
        ({"name": "luspo", "clip_eps": 0.2}, "the loss of luspo has one"),
    ],
)
def test_losses_with_a_clip_are_refused(algo, said):
    with pytest.raises(UserError, match=f"in the place of a clip, and {said}: set --algo.loss ratio"):
        M2PO(M2PO.Options()).check_run({"algo": algo})


@pytest.mark.parametrize("algo", [{"name": "grpo", "loss": "ratio", "clip_eps": 0.2}, {"name": "vespo", "k": 2.0}])
def test_losses_without_one_are_not(algo):
    M2PO(M2PO.Options()).check_run({"algo": algo})
