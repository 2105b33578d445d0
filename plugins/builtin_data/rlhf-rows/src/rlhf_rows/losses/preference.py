"""Preference losses of pairs, unreduced: each compares the chosen completion with the rejected one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_host import SEQUENCE_MEAN_TOKEN_MEAN, TOKEN_MEAN, Batch, Experience, Extra, LossTerm, Metric, Outputs
from rlhf_host.functional import masked_sum
from rlhf_rows.losses.options import PreferenceOptions

PreferenceLoss = Callable[[Tensor, Tensor, PreferenceOptions], Tensor]
"""``(chosen, rejected, options)`` → the loss, ``[P]`` each. The first two are sums over trained tokens of ``log π − log ref``,
or of ``log π`` without a reference; means if ``options.averages``.
"""

NEAR_0 = -1e-6
MAX_LOG = 20.0
"""Largest exponent."""


# --- rows and pairs -----------------------------------------------------------------------------------


def pairs(batch: Batch) -> tuple[Tensor, ...]:
    """Returns the places of the chosen and of the rejected rows, ``[P]`` int64 each: pair by pair, wherever the rows are; and of
    the gold rows, if the units are triples.

    Raises:
        ValueError: a unit is not one chosen and one rejected row, with a gold row in every unit or in none.
    """
    if "label" not in batch.columns:
        raise ValueError("the batch has no column 'label', 1 for chosen and 0 for rejected rows: train on preference data")
    label = batch.columns["label"]
    marks = [label == 1, label == 0]
    if "gold" in batch.columns:
        marks.append(batch.columns["gold"] == 1)
    places = tuple(mark.nonzero().squeeze(-1) for mark in marks)
    places = tuple(rows[batch.unit_id[rows].argsort()] for rows in places)
    units = batch.unit_id[places[0]]
    matched = all(torch.equal(units, batch.unit_id[rows]) for rows in places) and len(units.unique()) == len(units)
    if not matched or len(torch.cat(places)) != len(batch):
        raise ValueError(
            "a pair is two rows with one unit_id, label 1 and label 0, in one micro-batch: AlgoNeeds(unit_rows=True)"
        )
    return places


def on_rows(values: Tensor, *places: Tensor) -> Tensor:
    """Converts ``[P]`` to ``[B]``: each pair's value on its rows, so that their mean over episodes is the mean over pairs.

    Args:
        places: as returned by ``pairs``; every row is in one of them.
    """
    rows = torch.cat(places)
    return values.new_zeros(len(rows)).index_put((rows,), values.repeat(len(places)))


def chosen_tokens(batch: Batch) -> Tensor:
    """Returns ``[B, T]`` bool: tokens of chosen or desirable rows in the loss."""
    return batch.loss_mask & (batch.columns["label"] == 1).unsqueeze(-1)


def prepared_pairs(experience: Experience, options: PreferenceOptions) -> dict[str, Any]:
    """Returns what ``prepare_batch`` gives for ``preference_loss``: the tokens whose likelihood is in the loss, if any."""
    return {"chosen": chosen_tokens(experience)} if options.nll_weight > 0 else {}


# --- losses -------------------------------------------------------------------------------------------


def _sigmoid(chosen: Tensor, rejected: Tensor, options: PreferenceOptions) -> Tensor:
    """DPO, ``−(1−ε)·log σ(βh − γ) − ε·log σ(γ − βh)``, ``h = chosen − rejected`` (arXiv:2305.18290, eq. 7). With label smoothing ε:
    conservative DPO (Mitchell, "A note on DPO with noisy preferences", 2023, eq. 3). Of means and without a reference: SimPO
    (arXiv:2405.14734, eq. 6)."""
    logits = options.beta * (chosen - rejected) - options.gamma
    return -(1 - options.label_smoothing) * logsigmoid(logits) - options.label_smoothing * logsigmoid(-logits)


def _hinge(chosen: Tensor, rejected: Tensor, options: PreferenceOptions) -> Tensor:
    """``max(0, 1 − βh)`` (SLiC, arXiv:2305.10425; as a normalised likelihood in RSO, arXiv:2309.06657)."""
    return torch.relu(1 - options.beta * (chosen - rejected))


def _ipo(chosen: Tensor, rejected: Tensor, options: PreferenceOptions) -> Tensor:
    """``(h − 1/(2β))²`` (IPO, arXiv:2310.12036, eq. 17)."""
    return (chosen - rejected - 1 / (2 * options.beta)).square()


def _robust(chosen: Tensor, rejected: Tensor, options: PreferenceOptions) -> Tensor:
    """``(−(1−ε)·log σ(βh) + ε·log σ(−βh)) / (1 − 2ε)``: without bias when a share ε of the labels is flipped (arXiv:2403.00409)."""
    logits, noise = options.beta * (chosen - rejected), options.label_smoothing
    return (-(1 - noise) * logsigmoid(logits) + noise * logsigmoid(-logits)) / (1 - 2 * noise)


def _exo_pair(chosen: Tensor, rejected: Tensor, options: PreferenceOptions) -> Tensor:
    """``KL(q ‖ p)`` of ``q = (σ(βh), σ(−βh))`` and ``p = (1−ε, ε)`` (EXO, arXiv:2402.00856, eq. 16)."""
    logits = options.beta * (chosen - rejected)
    good, bad = math.log1p(-options.label_smoothing), math.log(options.label_smoothing)
    return torch.sigmoid(logits) * (logsigmoid(logits) - good) + torch.sigmoid(-logits) * (logsigmoid(-logits) - bad)


def _nca_pair(chosen: Tensor, rejected: Tensor, options: PreferenceOptions) -> Tensor:
    """``−log σ(c) − ½·log σ(−c) − ½·log σ(−r)`` of the implicit rewards (NCA, arXiv:2402.05369, with hard labels and two
    completions)."""
    c, r = options.beta * chosen, options.beta * rejected
    return -logsigmoid(c) - 0.5 * logsigmoid(-c) - 0.5 * logsigmoid(-r)


def _bco_pair(chosen: Tensor, rejected: Tensor, options: PreferenceOptions) -> Tensor:
    """``−log σ(c) − log σ(−r)`` of the implicit rewards (BCO, arXiv:2404.04656, without its reward shift)."""
    return -logsigmoid(options.beta * chosen) - logsigmoid(-options.beta * rejected)


def _sppo_hard(chosen: Tensor, rejected: Tensor, options: PreferenceOptions) -> Tensor:
    """``(chosen − 1/(2β))² + (rejected + 1/(2β))²`` (SPPO, arXiv:2405.00675, eq. 4.7 with probabilities 1 and 0)."""
    return (chosen - 0.5 / options.beta).square() + (rejected + 0.5 / options.beta).square()


def _apo_zero(chosen: Tensor, rejected: Tensor, options: PreferenceOptions) -> Tensor:
    """``1 − σ(β·chosen) + σ(β·rejected)``: for chosen completions better than the model's (APO, arXiv:2408.06266, eq. 7)."""
    return torch.sigmoid(-options.beta * chosen) + torch.sigmoid(options.beta * rejected)


def _apo_down(chosen: Tensor, rejected: Tensor, options: PreferenceOptions) -> Tensor:
    """``σ(β·chosen) + 1 − σ(βh)``: for chosen completions worse than the model's (APO, arXiv:2408.06266, eq. 8)."""
    return torch.sigmoid(options.beta * chosen) + torch.sigmoid(options.beta * (rejected - chosen))


def _discopop(chosen: Tensor, rejected: Tensor, options: PreferenceOptions) -> Tensor:
    """A blend of ``−log σ(βh)`` and ``exp(−βh)`` by ``σ(βh/τ)`` (DiscoPOP, arXiv:2406.08414, eq. 5); the exponent at most 20."""
    logits = options.beta * (chosen - rejected)
    blend = torch.sigmoid(logits / options.discopop_tau)
    return -logsigmoid(logits) * (1 - blend) + (-logits).clamp(max=MAX_LOG).exp() * blend


def _orpo(chosen: Tensor, rejected: Tensor, options: PreferenceOptions) -> Tensor:
    """``−β·log σ(log odds(chosen) − log odds(rejected))``, ``log odds(x) = x − log(1 − eˣ)`` of mean log-probabilities (ORPO,
    arXiv:2403.07691, eqs. 4 and 7). ``nll_coef`` is the weight of its other term."""
    # A probability of 1 has no odds.
    c, r = chosen.clamp(max=NEAR_0), rejected.clamp(max=NEAR_0)
    odds = c - torch.log(-torch.expm1(c)) - r + torch.log(-torch.expm1(r))
    return -options.beta * logsigmoid(odds)


preference_losses: dict[str, PreferenceLoss] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "ipo_sum": _ipo,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "orpo": _orpo,
}


def preference_loss(outputs: Outputs, batch: Batch, options: PreferenceOptions) -> list[LossTerm | Metric]:
    """Returns the preference term of one micro-batch, a mean over pairs, and the chosen's negative log-likelihood if it is on.

    For the latter ``prepare_batch`` must return the tokens to imitate as ``chosen``, ``[B, T]`` bool, such as ``chosen_tokens``.
    Masked positions may have any values.
    """
    if outputs.logprobs is None:
        raise ValueError("a preference loss needs outputs.logprobs")
    places = pairs(batch)
    chosen, rejected = places[:2]
    mask, logprobs = batch.loss_mask, outputs.logprobs
    scores = _scores(logprobs if options.without_reference else logprobs - batch.logprobs["reference"], mask, places, options)
    values = preference_losses[options.loss](scores[chosen], scores[rejected], options)
    items: list[LossTerm | Metric] = [LossTerm("preference", on_rows(values, *places))]
    if options.nll_weight > 0:
        nll = torch.where(mask, -logprobs, 0.0)
        mean = TOKEN_MEAN if options.nll_mean == "tokens" else SEQUENCE_MEAN_TOKEN_MEAN
        items.append(LossTerm("nll", nll, Extra("chosen"), coefficient=options.nll_weight, aggregation=mean))
    rewards, sums = options.beta * scores.detach(), masked_sum(logprobs.detach(), mask, -1)
    both = mask.any(-1)[chosen] & mask.any(-1)[rejected]
    margin = rewards[chosen] - rewards[rejected]
    items += [Metric("rewards/margin", margin, both), Metric("accuracy", (margin > 0).float(), both)]
    for side, rows in (("chosen", chosen), ("rejected", rejected)):
        items += [Metric(f"rewards/{side}", rewards[rows], both), Metric(f"logprobs/{side}", sums[rows], both)]
    return items


def _scores(values: Tensor, mask: Tensor, places: tuple[Tensor, ...], options: PreferenceOptions) -> Tensor:
    """Returns ``[B]``: the sum of ``values`` ``[B, T]`` over the mask's tokens, or their mean if the loss compares means.

    With ``ld_alpha``, tokens beyond the shorter completion's length weigh less (LD-DPO, arXiv:2409.06411, eq. 9).
    """
    values, lengths = torch.where(mask, values, 0.0), mask.sum(-1)
    if options.ld_alpha is not None:
        shorter = on_rows(torch.minimum(*(lengths[rows] for rows in places[:2])), *places)
        values = torch.where(mask.cumsum(-1) > shorter.unsqueeze(-1), options.ld_alpha * values, values)
    sums = values.sum(-1)
    return sums / lengths.clamp(min=1) if options.averages else sums
