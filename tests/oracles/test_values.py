"""The critic's loss against verl and OpenRLHF (TRL 1.16 has no critic)."""

import pytest

from rlhf_host import LossTerm
from rlhf_host import functional as F


def ours(case, clip):
    returns = (case.values + case.advantages).masked_fill(~case.mask, float("nan"))
    old = case.batch.values["critic"]
    return case.reduced(lambda values: [LossTerm("value", F.value_loss(values, old, returns, case.mask, clip))])


@pytest.mark.parametrize("observations", [False, True])
@pytest.mark.parametrize("clip", [0.05, 0.5])
def test_the_clipped_loss_is_that_of_verl_and_openrlhf(make_case, same, verl, openrlhf, clip, observations):
    case = make_case(observations=observations)
    returns, mask = case.values + case.advantages, case.mask.double()
    # "values" of the forward pass: any numbers that move some values out of the range
    current = case.values + 0.4 * case.reference.sin()
    assert ((current - case.values).abs() > 0.05)[case.mask].any()
    same(ours(case, clip), lambda v: verl.core.compute_value_loss(v, returns, case.values, mask, clip)[0], current)
    theirs = openrlhf.loss.ValueLoss(clip_eps=clip)
    same(ours(case, clip), lambda v: theirs(v, case.values, returns, mask), current)


def test_without_clipping_it_is_openrlhfs(make_case, same, openrlhf):
    case = make_case()
    theirs = openrlhf.loss.ValueLoss(clip_eps=None)
    returns, mask = case.values + case.advantages, case.mask.double()
    same(ours(case, None), lambda v: theirs(v, case.values, returns, mask), case.values + 0.3)
