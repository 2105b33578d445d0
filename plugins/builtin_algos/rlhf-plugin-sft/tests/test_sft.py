"""SFT against hand-worked values."""

import importlib.metadata
import math

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_sft import SFT

from rlhf_host import LossTerm, Metric, Outputs


def items(logprobs, batch, **options):
    made = list(SFT(SFT.Options(**options)).compute_loss(Outputs(logprobs=logprobs), batch))
    return [one for one in made if isinstance(one, LossTerm)], {one.name: one for one in made if isinstance(one, Metric)}


def test_the_loss_is_the_negative_log_likelihood_of_trained_tokens():
    batch = make_batch([4, 2], observations=True)  # the third token is not trained
    logprobs = torch.tensor([[-1.0, -2.0, float("nan"), -4.0], [-0.5, -0.25, float("nan"), float("nan")]])
    (term,), metrics = items(logprobs, batch)
    assert term.values.tolist() == [[1.0, 2.0, 0.0, 4.0], [0.5, 0.25, 0.0, 0.0]]
    assert str(term.aggregation) == "token-mean"
    assert metrics["nll"].values[metrics["nll"].mask].tolist() == [1.0, 2.0, 4.0, 0.5, 0.25]


def test_dft_weighs_each_token_by_its_probability_without_gradient():
    batch = make_batch([2])
    logprobs = torch.tensor([[math.log(0.5), math.log(0.1)]], requires_grad=True)
    (term,), metrics = items(logprobs, batch, loss="dft")
    assert term.values[0].tolist() == pytest.approx([0.5 * math.log(2), 0.1 * math.log(10)])
    term.values.sum().backward()
    assert logprobs.grad[0].tolist() == pytest.approx([-0.5, -0.1])
    assert metrics["nll"].values[0].tolist() == pytest.approx([math.log(2), math.log(10)])


def test_it_needs_completions_and_an_actor_alone():
    needs = SFT(SFT.Options()).needs()
    assert (needs.data, needs.rewards, needs.samples) == ("prompt_completion", False, False)
    assert [(role.name, role.trainable, role.lr) for role in needs.roles] == [("actor", True, 2e-5)]
    (entry,) = [e for e in importlib.metadata.entry_points(group="rlhf.algos") if e.name == "sft"]
    assert entry.load() is SFT
