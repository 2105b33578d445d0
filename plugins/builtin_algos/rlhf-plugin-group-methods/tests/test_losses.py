"""Losses against float64 loops of the papers' formulas: values and gradients, as the host reduces them."""

from __future__ import annotations

import math

import pytest
import torch
from rlhf_authoring import make_batch

from rlhf_host import Outputs
from rlhf_host.installed import build, find
from rlhf_host.internals import Denominators, Reducer

OPTIONS = {
    "gmpo": {"clip_eps": 0.1, "clip_eps_high": 0.15},
    "luspo": {"clip_eps": 0.02, "clip_eps_high": 0.03},
    "vespo": {"k": 2.0, "lam": 3.0, "k_negative": 3.0, "lam_negative": 2.0},
}


def example():
    """Rows of unequal lengths with observations, advantages of both signs, and policies that have moved."""
    batch = make_batch([9, 4, 2, 7, 1], groups=[0, 0, 0, 1, 1], observations=True, seed=4)
    random = torch.Generator().manual_seed(5)
    values = torch.tensor([0.7, -1.3, 0.4, -0.2, 1.1]).unsqueeze(-1)
    batch.advantages = torch.where(batch.action_mask, values, float("nan"))
    gap = 0.15 * torch.randn(batch.action_mask.shape, generator=random, dtype=torch.float64)
    batch.old_logprobs = (batch.sampler_logprobs.double() - gap).float()
    return batch


def found(name, batch):
    """The loss and its gradient by each log-probability."""
    logprobs = torch.where(batch.completion_mask, batch.sampler_logprobs, 0.0).requires_grad_()
    algo = build(find("algo", name), OPTIONS[name])
    term = next(iter(algo.compute_loss(Outputs(logprobs=logprobs), batch)))
    loss = Reducer(Denominators.of(batch)).reduce(term, list(range(len(batch))), None)
    loss.backward()
    return loss.item(), logprobs.grad


def clipped(value, low, high):
    return min(max(value, low), high)


def expected(name, batch):
    """The same by plain numbers; the gradient by the derivative of each formula."""
    options, loss, gradient = OPTIONS[name], 0.0, torch.zeros(batch.action_mask.shape, dtype=torch.float64)
    tokens = int(batch.action_mask.sum())
    for row in range(len(batch)):
        places = batch.action_mask[row].nonzero().squeeze(-1).tolist()
        new = [float(batch.sampler_logprobs[row, t]) for t in places]
        gaps = [one - float(batch.old_logprobs[row, t]) for one, t in zip(new, places, strict=True)]
        advantage, count = float(batch.advantages[row, places[0]]), len(places)
        if name == "luspo":
            # -|y|·min(s·A, clip(s)·A) with s = exp(mean of the gaps): arXiv:2602.05261
            ratio = math.exp(sum(gaps) / count)
            bounded = clipped(ratio, 1 - options["clip_eps"], 1 + options["clip_eps_high"])
            loss -= count * min(ratio * advantage, bounded * advantage) / len(batch)
            slope = -ratio * advantage / len(batch) if ratio * advantage <= bounded * advantage else 0.0
            slopes = [slope] * count
        elif name == "gmpo":
            # -A·exp(mean of the gaps, each clipped on the side that would raise the objective): arXiv:2507.20673
            low, high = -options["clip_eps"], options["clip_eps_high"]
            kept = [min(gap, high) if advantage > 0 else max(gap, low) for gap in gaps]
            value = -advantage * math.exp(sum(kept) / count) / len(batch)
            loss += value
            slopes = [value / count if kept[i] == gaps[i] else 0.0 for i in range(count)]
        else:
            # -e^lam·w^k·e^(-lam·w)·A·log pi with w the product of the ratios, a mean over tokens: arXiv:2602.10693
            suffix = "" if advantage >= 0 else "_negative"
            k, lam, product = options["k" + suffix], options["lam" + suffix], math.prod(map(math.exp, gaps))
            weight = math.exp(lam) * product**k * math.exp(-lam * product)
            loss -= weight * advantage * sum(new) / tokens
            slopes = [-weight * advantage / tokens] * count
        for t, slope in zip(places, slopes, strict=True):
            gradient[row, t] = slope
    return loss, gradient


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_loss_and_gradient_are_those_of_the_paper(name):
    loss, gradient = found(name, example())
    wanted, slopes = expected(name, example())
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert torch.allclose(gradient.double(), slopes, rtol=1e-4, atol=1e-7)
    assert (slopes == 0).any()  # observations, and what is clipped
