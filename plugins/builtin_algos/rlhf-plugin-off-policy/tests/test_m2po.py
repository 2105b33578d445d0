"""M2PO against a loop that takes the tokens out one by one."""

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_off_policy.m2po import M2PO

from rlhf_host import Outputs


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
