"""Exact reduction: every loss term is divided by counts over the whole optimizer batch, however it is split."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from rlhf_host.records.ragged import RaggedTensor, Rows
from rlhf_host.records.tensors import ACTION, COMPLETION, LOSS, Aggregation, Batch, Extra, LossTerm, Mask, Metric
from rlhf_host.training.corrections import Corrections
from rlhf_host.training.deferred_values import DeferredValues

REDUCTIONS = ("mean", "sum", "min", "max", "ess", "calibration")
BINS = 10
"""Number of confidence bins, for calibration."""


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts of the whole optimizer batch that loss weights depend on. Every rank has all of them, but only its own rows' data."""

    masks: dict[str, RaggedTensor]
    """``[B, T]`` bool by name; a plugin's own masks are ``ALIAS.NAME``."""
    shape: Rows
    group_id: Tensor
    episode_id: Tensor

    @classmethod
    def of(cls, batch: Batch) -> Denominators:
        masks: dict[str, Tensor] = {mask.name: getattr(batch, mask.name) for mask in (LOSS, ACTION, COMPLETION)}
        for alias, own in batch.extra.items():
            for name, value in own.items():
                if isinstance(value, Tensor) and value.dtype == torch.bool and value.shape == batch.loss_mask.shape:
                    masks[f"{alias}.{name}"] = value
        shape = Rows.of(batch.completion_mask)
        return cls({name: shape.ragged(mask) for name, mask in masks.items()}, shape, batch.group_id, batch.episode_id)

    def mask(self, mask: Mask, alias: str = "") -> RaggedTensor:
        """Returns the mask. Raises ``ValueError`` if the plugin ``alias`` has no such mask."""
        name = f"{alias}.{mask.name}" if isinstance(mask, Extra) else mask.name
        if name not in self.masks:
            raise ValueError(f"a loss term has the mask {mask}, and prepare_batch gave no tensor [B, T] of bool by that name")
        return self.masks[name]


def token_weights(aggregation: Aggregation, mask: Tensor, group_id: Tensor, episode_id: Tensor) -> Tensor:
    """Returns ``[B, T]`` float64 weights with ``loss = Σ weights·values`` over the optimizer batch.

    A sequence mean weights an episode's ``k`` trajectories by ``1/k``; rows without any token in the mask do not count.

    Args:
        mask: ``[B, T]`` bool over the whole optimizer batch.
        group_id: ``[B]`` int64.
        episode_id: ``[B]`` int64.
    """
    return torch.where(mask, token_shares(aggregation, mask, group_id, episode_id).unsqueeze(-1), 0.0)


def token_shares(aggregation: Aggregation, mask: Tensor, group_id: Tensor, episode_id: Tensor) -> Tensor:
    """Returns ``[B]`` float64: the weight of each token in the mask, which all of a row have in common; see ``token_weights``."""
    tokens = mask.sum(-1).to(torch.float64)
    if aggregation.name == "token-mean":
        return (1.0 / tokens.sum().clamp(min=1)).expand(len(tokens))
    if aggregation.name == "group-mean-token-mean":
        groups, of_row = torch.unique(group_id, return_inverse=True)
        per_group = torch.zeros(len(groups), dtype=torch.float64, device=mask.device).index_add(0, of_row, tokens)
        counted = (per_group > 0).sum().clamp(min=1)
        return 1.0 / (per_group.clamp(min=1)[of_row] * counted)
    rows = row_weights(mask, episode_id)
    divisor = tokens.clamp(min=1) if aggregation.name == "sequence-mean-token-mean" else aggregation.length or 1.0
    return rows / divisor


def row_weights(mask: Tensor, episode_id: Tensor) -> Tensor:
    """Returns ``[B]`` float64 weights that sum to 1: rows with a token in ``mask`` count, an episode's ``k`` rows ``1/k`` each."""
    present = mask.any(-1).to(torch.float64)
    episodes, of_row = torch.unique(episode_id, return_inverse=True)
    rows = torch.zeros(len(episodes), dtype=torch.float64, device=mask.device).index_add(0, of_row, present)
    return present / rows.clamp(min=1)[of_row] / (rows > 0).sum().clamp(min=1)


@dataclass(slots=True)
class Reducer:
    """Weights of one optimizer batch: shares, computed once per (mask, aggregation), of the tokens in a micro-batch's masks."""

    whole: Denominators
    _weights: dict[tuple[Mask, str, Aggregation | None], Tensor] = field(default_factory=dict)

    def reduce(self, term: LossTerm, rows: list[int], corrections: Corrections | None, alias: str = "") -> Tensor:
        """Returns the term's share of the batch loss, a float32 scalar with gradient.

        Args:
            term: its ``values`` are ``[b, t]`` over the micro-batch, or ``[b]``.
            rows: the micro-batch's rows in the optimizer batch.
            corrections: multiplied into terms marked ``corrected``.
            alias: alias of the plugin that gave the term.

        Raises:
            ValueError: for an unknown mask, or values of the wrong shape.
        """
        values = term.values.float()
        count, width = len(rows), int(self.whole.shape.lengths[rows].max()) if rows else 0
        if values.shape not in ((count,), (count, width)):
            shape = tuple(values.shape)
            raise ValueError(f"loss term {term.name!r} has shape {shape}; expected [{count}] or [{count}, {width}]")
        per_row = values.dim() == 1
        key = (term.mask, alias, None if per_row else term.aggregation)
        mask, whole = self.whole.mask(term.mask, alias), self.whole
        if key not in self._weights:
            if per_row:
                self._weights[key] = row_weights(mask, whole.episode_id)
            else:
                self._weights[key] = token_shares(term.aggregation, mask, whole.group_id, whole.episode_id)
        weights = self._weights[key][rows]
        if not per_row:
            weights = torch.where(mask.padded(rows, width), weights.unsqueeze(-1), 0.0)
        if corrections is not None and term.corrected:
            values = values * corrections.of(values)[0]
        weights = weights.to(torch.float32).to(values.device, non_blocking=True)
        # Sanitised before the product: 0·NaN is NaN, in the gradient too.
        return term.coefficient * (torch.where(weights != 0, values, 0.0) * weights).sum()

    def count(self, term: LossTerm, alias: str = "") -> int:
        """Returns the number of things that the term is a mean over: tokens, groups or episodes of the optimizer batch."""
        mask = self.whole.mask(term.mask, alias)
        if term.values.dim() > 1 and term.aggregation.name == "token-mean":
            return int(mask.sum())
        grouped = term.values.dim() > 1 and term.aggregation.name == "group-mean-token-mean"
        ids = self.whole.group_id if grouped else self.whole.episode_id
        return len(ids[mask.any(-1)].unique())


@dataclass(slots=True)
class Metrics:
    """Metrics on their way up: sums, counts and extremes, combined exactly however the batch was split."""

    _sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    _totals: dict[str, float] = field(default_factory=dict)
    _low: dict[str, float] = field(default_factory=dict)
    _high: dict[str, float] = field(default_factory=dict)
    _weights: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """``Σw``, ``Σw²`` and count."""
    _bins: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Sum per bin of confidence minus correctness, and the count."""

    def add(self, metrics: Iterable[Metric], prefix: str = "", *, readings: DeferredValues | None = None) -> None:
        """Adds metrics. Raises ``ValueError`` for an invalid name, mask or reduction.

        Args:
            readings: the metrics count when these are read; default: at once, which waits for the device of their values.
        """
        later = DeferredValues() if readings is None else readings
        for metric in metrics:
            values, mask = torch.as_tensor(metric.values, dtype=torch.float64).detach(), metric.mask
            fits = mask is None or (mask.dtype == torch.bool and mask.shape == values.shape)
            if not fits or metric.reduce not in REDUCTIONS or not isinstance(metric.name, str):
                needed = f"a name, reduce of {', '.join(REDUCTIONS)}, and a bool mask of the shape {list(values.shape)} or none"
                raise ValueError(f"the metric {metric.name!r} needs {needed}")
            if values.numel():
                mask = None if mask is None else mask.to(values.device, non_blocking=True)
                later.take(_numbers(values, mask, metric.reduce), partial(self._count, prefix + metric.name, metric.reduce))
        if readings is None:
            later.read()

    def _count(self, name: str, reduce: str, numbers: list[float]) -> None:
        """Counts what ``_numbers`` returned for a metric."""
        count, *values = numbers
        if not count:
            return
        if reduce == "mean":
            total, before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (total + values[0], before + count)
        elif reduce == "sum":
            self._totals[name] = self._totals.get(name, 0.0) + values[0]
        elif reduce == "min":
            self._low[name] = min(self._low.get(name, math.inf), values[0])
        elif reduce == "max":
            self._high[name] = max(self._high.get(name, -math.inf), values[0])
        else:
            _add(self._weights if reduce == "ess" else self._bins, name, (*values, count))

    def join(self, other: Metrics, prefix: str = "") -> None:
        """Adds another part of the same optimizer batch. The result is the same as if its metrics had been added here."""
        for name, (total, count) in other._sums.items():
            mine = self._sums.get(prefix + name, (0.0, 0.0))
            self._sums[prefix + name] = (mine[0] + total, mine[1] + count)
        for name, value in other._totals.items():
            self._totals[prefix + name] = self._totals.get(prefix + name, 0.0) + value
        for name, value in other._low.items():
            self._low[prefix + name] = min(self._low.get(prefix + name, math.inf), value)
        for name, value in other._high.items():
            self._high[prefix + name] = max(self._high.get(prefix + name, -math.inf), value)
        for mine_of, others in ((self._weights, other._weights), (self._bins, other._bins)):
            for name, sums in others.items():
                _add(mine_of, prefix + name, sums)

    def merge(self, other: Metrics) -> None:
        """Adds another optimizer batch's metrics: means are weighted by count; a batch's sum becomes one value of a mean."""
        self.join(replace(other, _totals={}))
        for name, value in other._totals.items():
            # A batch's sum (a loss term's shares) is one observation among the step's updates.
            mine = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (mine[0] + value, mine[1] + 1)

    def as_mean(self, name: str, count: int, *, first: bool) -> None:
        """Turns a sum that is a mean over ``count`` things into one that can be combined with other batches'.

        Args:
            first: True on the first of the ranks that have shares of it.
        """
        self._sums[name] = (self._totals.pop(name, 0.0) * count, count * first)

    def result(self) -> dict[str, float]:
        means = {name: total / count for name, (total, count) in self._sums.items()}
        ess = {name: w * w / (count * square) if square else 0.0 for name, (w, square, count) in self._weights.items()}
        errors = {name: sum(map(abs, bins)) / count for name, (*bins, count) in self._bins.items()}
        return {**means, **self._totals, **self._low, **self._high, **ess, **errors}


def _add(sums: dict[str, tuple[float, ...]], name: str, more: tuple[float, ...]) -> None:
    sums[name] = tuple(map(sum, zip(sums[name], more, strict=True))) if name in sums else more


def _numbers(values: Tensor, mask: Tensor | None, reduce: str) -> Tensor:
    """Returns ``[k]`` float64: how many values count, then what ``reduce`` needs of them. They are not chosen from the others,
    because that would wait until the device has computed how many they are.
    """
    count = values.new_full((), values.numel()) if mask is None else mask.sum()

    def counted(otherwise: float) -> Tensor:
        return values if mask is None else torch.where(mask, values, otherwise)

    if reduce in ("min", "max"):
        numbers = [counted(math.inf).min() if reduce == "min" else counted(-math.inf).max()]
    elif reduce == "calibration":
        numbers = [*_overconfidence(counted(0.5))]
    else:
        numbers = [counted(0.0).sum()] + ([counted(0.0).square().sum()] if reduce == "ess" else [])
    return torch.stack([count.double(), *numbers])


def _overconfidence(given: Tensor) -> Tensor:
    """Returns ``[BINS]``: the overconfidence in ``_bins``, for probabilities of tokens that turned out to be true; a probability
    of 0.5 is half right, and adds nothing.
    """
    given = given.reshape(-1)
    confidence, right = torch.maximum(given, 1 - given), (given > 0.5).double() + 0.5 * (given == 0.5)
    bins = ((confidence - 0.5) * 2 * BINS).long().clamp(0, BINS - 1)
    return given.new_zeros(BINS).index_add(0, bins, confidence - right)


def reduced(metrics: Iterable[Metric]) -> dict[str, float]:
    """Returns the metrics of one place, reduced."""
    together = Metrics()
    together.add(metrics)
    return together.result()
