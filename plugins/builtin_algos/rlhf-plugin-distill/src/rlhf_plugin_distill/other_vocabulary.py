"""Losses between distributions over two vocabularies: ULD, and that of GOLD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_plugin_distill.divergence import FULLEST, divergence

NOTHING = -1e4
"""Log-probability of entries that do not count: its exponential is 0, and it has a gradient of 0."""


@dataclass(frozen=True, slots=True)
class Spans:
    """``N`` pieces of text in the tokens of both models, from a micro-batch."""

    rows: Tensor
    """``[N]``: the row of each."""
    begin: Tensor
    """``[N]``: the student's first token, among the row's completion tokens."""
    count: Tensor
    other_begin: Tensor
    other_count: Tensor

    @classmethod
    def of(cls, table: Tensor) -> Spans:
        """Returns the spans of ``[B, T, 3]``: at each span's first token, how many tokens it has, and the teacher's first and how
        many; zeros at all others.
        """
        rows, begin = (table[..., 0] > 0).nonzero(as_tuple=True)
        count, other_begin, other_count = table[rows, begin].unbind(-1)
        return cls(rows, begin, count, other_begin, other_count)


def one_of_both(table: Tensor) -> Tensor:
    """Returns ``[B, T]``: whether a piece of ``[B, T, 3]``, as in ``Spans.of``, is one token of both: the same bytes."""
    return (table[..., 0] == 1) & (table[..., 2] == 1)


def joint(
    logprobs: Tensor, rows: Tensor, begin: Tensor, count: Tensor, merge: Literal["last", "first"]
) -> tuple[Tensor, Tensor]:
    """Returns the token whose distribution stands for each span, ``[N]``, and ``[N]``: the log-probability of its other tokens
    together, by the chain rule.

    ``last``: ``P(y) = Π_{j<n} p(x_j)·p_n(y)``, what the model gives to the span's text with another last token. ``first``:
    ``P(y) = p_1(y)·Π_{j>1} p(x_j)``, where later tokens keep their probability whatever the first is.

    Args:
        logprobs: ``[B, T]``: of the tokens that are there; the float type of the result.
    """
    end = begin + count
    sums = torch.cat([torch.zeros_like(logprobs[:, :1]), logprobs.cumsum(-1)], -1)
    at = end - 1 if merge == "last" else begin
    low, high = (begin, end - 1) if merge == "last" else (begin + 1, end)
    return at, sums[rows, high] - sums[rows, low]


def measures(
    logs: Tensor, of_tokens: Tensor, spans: tuple[Tensor, Tensor, Tensor], merge: Literal["last", "first"]
) -> tuple[Tensor, Tensor]:
    """Returns ``[N, V]``: log-probabilities of each span with every token in one place, and ``[N]``: of its other tokens.

    Args:
        logs: ``[B, T, V]``.
        of_tokens: ``[B, T]``: log-probabilities of the tokens that are there.
        spans: their rows, first tokens and numbers of tokens.
    """
    at, others = joint(of_tokens.double(), *spans, merge)
    return logs[spans[0], at] + others.to(logs.dtype).unsqueeze(-1), others.to(logs.dtype)


def whole_loss(
    teacher: Tensor, student: Tensor, shared: Tensor, beta: float, weights: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss of each span, ``[N]``, and its parts: the divergence of the shared tokens and the distance of the others.

    ``w_m·D(T_m, S_m) + w_u·Σ_i |T↓_i − S↓_i|``: ``D`` over tokens of both vocabularies; the others are sorted, each model's by
    itself, the shorter list filled with zeros (ULD, arXiv:2402.12030, eq. 4; GOLD).

    Args:
        teacher: ``[N, V']`` log-probabilities, without gradient; ``student``: ``[N, V]``.
        shared: ``[S, 2]``: the teacher's and the student's number of each token of both.
        weights: ``w_m`` and ``w_u``.
    """
    matched = measure_divergence(teacher[:, shared[:, 0]], student[:, shared[:, 1]], beta)
    own = [_without(teacher, shared[:, 0]), _without(student, shared[:, 1])]
    distance = _distance(*(logs.sort(-1, descending=True).values for logs in own))
    return weights[0] * matched + weights[1] * distance, matched, distance


def _distance(theirs: Tensor, ours: Tensor) -> Tensor:
    """Returns ``[N]``: the sum of ``|p_i - q_i|`` over sorted log-probabilities, the shorter list filled with zeros."""
    width = max(theirs.shape[-1], ours.shape[-1])
    p, q = (pad(each.exp(), (0, width - each.shape[-1])) for each in (theirs, ours))
    return (q - p).abs().sum(-1)


def _without(logs: Tensor, numbers: Tensor) -> Tensor:
    keep = torch.ones(logs.shape[-1], dtype=torch.bool, device=logs.device)
    keep[numbers] = False
    return logs[:, keep]


def likeliest_loss(
    teacher: tuple[Tensor, Tensor, Tensor],
    student: tuple[Tensor, Tensor],
    shared: Tensor,
    vocabulary: int,
    beta: float,
    weights: tuple[float, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the same from the teacher's likeliest tokens; from all of them it is ``whole_loss``.

    The likeliest are known token by token: shared ones, and the first of the teacher's sorted others. The student's sorted others
    are compared as far as these go, and again from where the teacher has none left, which is with 0. All tokens between, and
    shared ones beyond the likeliest, count as one on each side: with the shared tokens, or without any, with the sorted ones.

    Args:
        teacher: ``[N, k]`` log-probabilities, ``[N, k]`` numbers, and ``[N]`` the log-probability of the span's other tokens.
        student: ``[N, V]`` and ``[N]``.
        vocabulary: number of all of the teacher's tokens.
    """
    logs, ids, others = teacher
    mine, mine_others = student
    known = torch.full(
        (max(int(each.max()) + 1 if each.numel() else 0 for each in (ids, shared[:, 0])),), -1, device=ids.device
    )
    known[shared[:, 0]] = shared[:, 1]
    number = known[ids]
    both = number >= 0
    t, s = (torch.where(both, each, NOTHING) for each in (logs, mine.gather(-1, number.clamp(min=0))))
    theirs = torch.where(both, NOTHING, logs).sort(-1, descending=True).values
    ours = _without(mine, shared[:, 1]).sort(-1, descending=True).values
    places = torch.arange(ours.shape[-1], device=ids.device)
    compared = (places < (~both).sum(-1, keepdim=True)) | (places >= vocabulary - len(shared))
    ours = torch.where(compared, ours, NOTHING)
    distance = _distance(theirs, ours)
    rest = _rest(logs, others), _rest(torch.cat([s, ours], -1), mine_others)
    if len(shared):
        t, s = (torch.cat([each, left.unsqueeze(-1)], -1) for each, left in zip((t, s), rest, strict=True))
        matched = measure_divergence(t, s, beta)
    else:
        matched = torch.zeros_like(distance)
        distance = distance + (rest[0].exp() - rest[1].exp()).abs()
    return weights[0] * matched + weights[1] * distance, matched, distance


def _rest(logs: Tensor, others: Tensor) -> Tensor:
    """Returns ``[N]``: the log-probability of all entries that are not in ``logs``, ``[N, k]``."""
    together = (logs.logsumexp(-1) - others).clamp(max=FULLEST)
    return others + torch.log(-torch.expm1(together))


def measure_divergence(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """Converts log-probabilities ``[..., k]`` that need not sum to 1 to ``[...]``: the divergence of ``divergence``, of which that
    to one side has ``Σ q − Σ p`` in addition, ``Σ p·log(p/q) − p + q``. So it is least, 0, where both are equal; without, a
    student that has less, or more, of the shared tokens than the teacher would do better. Between the sides it is the same.
    """
    values = divergence(teacher, student, beta)
    if beta in (0, 1):
        masses = student.exp().sum(-1) - teacher.exp().sum(-1)
        values = values + (masses if beta == 0 else -masses)
    return values


def span_gaps(table: Tensor, teacher: Tensor, student: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``[B, T]``: at each token of a piece of text ``log π_T − log π`` of the whole piece, because the gradient of its
    probability is the sum of those of its tokens; the same divided by the piece's tokens; and the mask of all of them.

    Args:
        table: as for ``Spans.of``.
        teacher: ``[B, T']``: its log-probabilities of its tokens.
        student: ``[B, T]``: those of the student, where ``known``.
    """
    spans = Spans.of(table)
    numbers, ends = torch.arange(len(spans.rows)), spans.count.cumsum(0)
    owner = numbers.repeat_interleave(spans.count)
    place = spans.begin[owner] + torch.arange(len(owner)) - (ends - spans.count)[owner]
    rows = spans.rows[owner]
    own = torch.zeros(len(numbers), dtype=torch.float64).index_add(0, owner, student[rows, place].double())
    unknown = torch.zeros(len(numbers)).index_add(0, owner, (~known[rows, place]).float()) > 0
    sums = pad(teacher.double().cumsum(-1), (1, 0))
    begin, end = spans.other_begin, spans.other_begin + spans.other_count
    gap = torch.where(unknown, 0.0, sums[spans.rows, end] - sums[spans.rows, begin] - own).float()
    gaps, shares = (torch.zeros(table.shape[:2]).index_put((rows, place), each[owner]) for each in (gap, gap / spans.count))
    return gaps, shares, torch.zeros(table.shape[:2], dtype=torch.bool).index_put((rows, place), ~unknown[owner])
