"""Losses of pairs and of single answers against the written formulas in plain floats."""

from __future__ import annotations

import math

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from rlhf_rows import losses
from rlhf_rows.losses import PreferenceOptions, SupervisedOptions, chosen_tokens, pairs, preference_losses

from rlhf_host.records.tensors import Extra, LossTerm, Metric, Outputs

SMOOTHING = {"robust": 0.2, "exo_pair": 0.1}


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def formula(loss, c, r, o):
    """Of the sums, or means, of the chosen's and the rejected's log-ratios."""
    h, e, b = c - r, o.label_smoothing, o.beta
    log = math.log
    if loss in ("sigmoid", "sigmoid_norm"):
        return -(1 - e) * log(sigmoid(b * h - o.gamma)) - e * log(sigmoid(o.gamma - b * h))
    if loss == "hinge":
        return max(0.0, 1 - b * h)
    if loss in ("ipo", "ipo_sum"):
        return (h - 1 / (2 * b)) ** 2
    if loss == "robust":
        return (-(1 - e) * log(sigmoid(b * h)) + e * log(sigmoid(-b * h))) / (1 - 2 * e)
    if loss == "exo_pair":
        q = sigmoid(b * h)
        return q * log(q / (1 - e)) + (1 - q) * log((1 - q) / e)
    if loss == "nca_pair":
        return -log(sigmoid(b * c)) - 0.5 * log(sigmoid(-b * c)) - 0.5 * log(sigmoid(-b * r))
    if loss == "bco_pair":
        return -log(sigmoid(b * c)) - log(sigmoid(-b * r))
    if loss == "sppo_hard":
        return (c - 1 / (2 * b)) ** 2 + (r + 1 / (2 * b)) ** 2
    if loss == "apo_zero":
        return 1 - sigmoid(b * c) + sigmoid(b * r)
    if loss == "apo_down":
        return sigmoid(b * c) + 1 - sigmoid(b * h)
    if loss == "discopop":
        blend = sigmoid(b * h / o.discopop_tau)
        return -log(sigmoid(b * h)) * (1 - blend) + math.exp(-b * h) * blend
    assert loss == "orpo"
    odds = [math.exp(x) / (1 - math.exp(x)) for x in (c, r)]
    return -b * log(sigmoid(log(odds[0]) - log(odds[1])))


@pytest.mark.parametrize("loss", sorted(preference_losses))
def test_each_loss_of_pairs_is_its_formula(loss):
    settings = {"loss": loss, "beta": 0.3, "label_smoothing": SMOOTHING.get(loss, 0.1 if loss.startswith("sigmoid") else 0.0)}
    settings |= {"gamma": 0.25} if loss.startswith("sigmoid") else {}
    options = PreferenceOptions(**settings)
    chosen, rejected = [-0.5, -2.0, -0.1], [-1.5, -0.25, -3.0]
    found = preference_losses[loss](torch.tensor(chosen), torch.tensor(rejected), options)
    expected = [formula(loss, c, r, options) for c, r in zip(chosen, rejected, strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=1e-4)


@pytest.fixture
def batch():
    """Two pairs, apart from each other: rows of 4 and 2 tokens, and of 1 and 3; log-ratios of 1, 2, 3 and 4 per token."""
    made = make_batch([4, 1, 2, 3])
    made.unit_id = made.episode_id = torch.tensor([7, 4, 7, 4])
    made.columns["label"] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    made.logprobs["reference"] = torch.full((4, 4), -5.0).masked_fill(~made.loss_mask, float("nan"))
    return made


def items(batch, **settings):
    options = PreferenceOptions(**settings)
    ratios = torch.tensor([1.0, 2.0, 3.0, 4.0]).unsqueeze(-1)
    logprobs = torch.where(batch.loss_mask, ratios - 5, float("nan"))
    made = losses.preference_loss(Outputs(logprobs=logprobs), batch, options)
    return {one.name: one for one in made if isinstance(one, LossTerm)}, {
        one.name: one.values for one in made if isinstance(one, Metric)
    }


def test_pairs_are_those_of_one_unit_and_chosen_rows_those_of_label_1(batch):
    assert [rows.tolist() for rows in pairs(batch)] == [[3, 0], [1, 2]]
    assert chosen_tokens(batch).sum(-1).tolist() == [4, 0, 0, 3]


def test_sums_are_compared_and_the_chosen_is_to_be_the_likelier_one(batch):
    terms, metrics = items(batch, beta=0.1)
    gaps = {7: 4 * 1.0 - 2 * 3.0, 4: 3 * 4.0 - 1 * 2.0}
    expected = [-math.log(sigmoid(0.1 * gaps[unit])) for unit in batch.unit_id.tolist()]
    assert terms["preference"].values.tolist() == pytest.approx(expected)
    assert metrics["rewards/margin"].tolist() == pytest.approx([0.1 * gaps[4], 0.1 * gaps[7]])
    assert metrics["accuracy"].tolist() == [1.0, 0.0]


def test_means_are_compared_where_the_loss_says_so(batch):
    terms, _ = items(batch, loss="ipo", beta=0.5)
    gaps = {7: 1.0 - 3.0, 4: 4.0 - 2.0}
    assert terms["preference"].values.tolist() == pytest.approx([(gaps[unit] - 1) ** 2 for unit in batch.unit_id.tolist()])


def test_tokens_beyond_the_shorter_answer_weigh_less(batch):
    terms, _ = items(batch, beta=0.1, ld_alpha=0.25)
    gaps = {7: (2 + 0.25 * 2) * 1.0 - 2 * 3.0, 4: (1 + 0.25 * 2) * 4.0 - 1 * 2.0}
    expected = [-math.log(sigmoid(0.1 * gaps[unit])) for unit in batch.unit_id.tolist()]
    assert terms["preference"].values.tolist() == pytest.approx(expected)


def test_without_a_reference_log_probabilities_are_compared_and_the_chosen_s_likelihood_is_a_term(batch):
    terms, _ = items(batch, loss="sigmoid", beta=0.1, reference_free=True, nll_coef=0.5)
    gap = 4 * -4.0 - 2 * -2.0
    assert float(terms["preference"].values[0]) == pytest.approx(-math.log(sigmoid(0.1 * gap)))
    nll = terms["nll"]
    assert (nll.coefficient, nll.mask, nll.values[0].tolist()) == (0.5, Extra("chosen"), [4.0] * 4)


@pytest.mark.parametrize(("loss", "expected"), [("nll", [0.5, 2.0]), ("dft", [0.5 * math.exp(-0.5), 2.0 * math.exp(-2.0)])])
def test_the_supervised_loss_is_the_negative_log_likelihood_or_that_times_the_probability(loss, expected):
    batch = make_batch([2])
    logprobs = torch.tensor([[-0.5, -2.0]], requires_grad=True)
    term, metric = losses.supervised_loss(Outputs(logprobs=logprobs), batch, SupervisedOptions(loss=loss))
    assert term.values[0].tolist() == pytest.approx(expected)
    assert metric.values[0].tolist() == [0.5, 2.0]
    term.values.sum().backward()
    weights = [-1.0, -1.0] if loss == "nll" else [-math.exp(-0.5), -math.exp(-2.0)]
    assert logprobs.grad[0].tolist() == pytest.approx(weights), "the weight has no gradient"


def test_masked_tokens_are_in_no_supervised_loss():
    batch = make_batch([3])
    batch.loss_mask[0, 1] = False
    logprobs = torch.tensor([[-0.5, float("nan"), -2.0]], requires_grad=True)
    term, _ = losses.supervised_loss(Outputs(logprobs=logprobs), batch, SupervisedOptions())
    assert term.values[0].tolist() == [0.5, 0.0, 2.0]
