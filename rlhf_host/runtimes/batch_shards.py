"""Shards: an optimizer batch's rows dealt out over ranks by tokens, packed so that a rank reads them without copying twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlhf_host.records.tensors import Batch
from rlhf_host.training.batching import group_rows

UNEVEN = 0.03
"""How far the heaviest rank may be above the mean before groups are split, which costs their prompt once more."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's rows: a batch with arrays in place of tensors, and ``rows``, their places in the whole batch."""

    rows: list[int]
    arrays: Batch

    def batch(self) -> Batch:
        return self.arrays.map(lambda _, array: torch.from_numpy(array if array.flags.writeable else array.copy()))


def make_shard(batch: Batch, rows: Sequence[int]) -> Shard:
    """The rows without what only the controller has."""
    part = batch.batch().select(rows)
    return Shard(list(rows), part.map(lambda _, tensor: tensor.detach().cpu().contiguous().numpy()))


def deal_rows(batch: Batch, count: int, *, unit_rows: bool) -> list[list[int]]:
    """Which rows each of ``count`` ranks gets, about equally many tokens each; a group stays together where that is even enough.

    Args:
        unit_rows: rows that share a ``unit_id`` must stay together.
    """
    if count == 1:
        return [list(range(len(batch)))]
    prompts = [len(prompt) for prompt in batch.prompt_ids]
    completions: list[int] = batch.lengths.tolist()
    units = group_rows((batch.unit_id if unit_rows else batch.group_id).tolist())
    while True:
        # A unit's prompt is mostly one, which is computed once.
        sizes = [sum(completions[i] for i in unit) + max(prompts[i] for i in unit) for unit in units]
        hands = deal(units, sizes, count)
        by_first = {unit[0]: size for unit, size in zip(units, sizes, strict=True)}
        loads = [sum(by_first[unit[0]] for unit in hand) for hand in hands]
        even = max(loads, default=0) <= (1 + UNEVEN) * sum(loads) / count
        if even or unit_rows or all(len(unit) == 1 for unit in units):
            return [sorted(row for unit in hand for row in unit) for hand in hands]
        units = [part for unit in units for part in (unit[: -(-len(unit) // 2)], unit[-(-len(unit) // 2) :]) if part]


def deal(units: Sequence[list[int]], sizes: Sequence[int], count: int) -> list[list[list[int]]]:
    """Share units out among ``count`` hands so that each has about equally many tokens: the largest first, to the hand with
    least. Within a hand they keep their order; with fewer units than hands some stay empty."""
    if count == 1:
        return [list(units)]
    loads, hands = [0] * count, [list[int]() for _ in range(count)]
    for number in sorted(range(len(units)), key=lambda i: (-sizes[i], i)):
        hand = loads.index(min(loads))
        loads[hand] += sizes[number]
        hands[hand].append(number)
    return [[list(units[number]) for number in sorted(hand)] for hand in hands]
