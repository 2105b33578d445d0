"""Shards: the rows of an optimizer batch, distributed over ranks by tokens and sent without padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_host.records.numbers import Numbers
from rlhf_host.records.tensors import Batch
from rlhf_host.training.batching import group_rows

UNEVEN = 0.03
"""Excess of the heaviest rank over the mean above which groups are split, which costs their prompt once more."""


PASSES = ("prompt_ids", "completion_ids", "completion_mask", "group_id", "unit_id", "temperature")
"""Fields of a ``Batch`` that a forward pass needs. They stay the same in a step, so they are sent once."""
UPDATES = tuple(field.name for field in dataclasses.fields(Batch) if field.name not in PASSES)
"""Fields that an update needs in addition."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """``[b, T, ...]`` without padding: the rows' tokens one after another."""

    values: np.ndarray
    dtype: torch.dtype
    fill: int
    """Value at padding."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def padded(self, mask: Tensor) -> Tensor:
        values = torch.from_numpy(self.values if self.values.flags.writeable else self.values.copy())
        out = torch.full((*mask.shape, *values.shape[1:]), self.fill, dtype=self.dtype)
        out[mask] = values.to(self.dtype)
        return out


@dataclass(frozen=True, slots=True)
class Shard:
    """Some fields of one rank's rows."""

    rows: list[int]
    """Their places in the whole batch."""
    lengths: np.ndarray
    """Completion tokens of each row."""
    fields: dict[str, Any]
    """Fields of a ``Batch``, with arrays and ``Ragged`` in place of tensors."""

    def batch(self, more: Shard | None = None) -> Batch:
        """Returns the rows with these fields, and those of ``more``; all other fields are None."""
        lengths = torch.from_numpy(self.lengths.copy())
        mask = torch.arange(int(lengths.max()) if len(lengths) else 0) < lengths[:, None]

        def tensor(_: str, value: Any) -> Tensor:
            if isinstance(value, Ragged):
                return value.padded(mask)
            return torch.from_numpy(value if value.flags.writeable else value.copy())

        fields: dict[str, Any] = {**dict.fromkeys((*PASSES, *UPDATES)), **self.fields, **(more.fields if more else {})}
        fields["prompt_ids"] = [list(prompt) for prompt in self.fields["prompt_ids"]]
        whole = Batch(**fields).map(tensor)
        whole.completion_mask = mask
        return whole


def make_shards(batch: Batch, rows_of_ranks: Sequence[Sequence[int]], names: Sequence[str]) -> list[Shard]:
    """Returns each rank's fields of these names. Padding of the host's own fields is left out; fields of plugins are sent
    unchanged.
    """
    fields: dict[str, Any] = {name: getattr(batch, name) if name in names else None for name in (*PASSES, *UPDATES)}
    fields["completion_mask"] = None  # known by the lengths
    some, lengths = Batch(**fields), batch.lengths
    return [_make_shard(some, batch.completion_mask.shape, rows, lengths, names) for rows in rows_of_ranks]


def _make_shard(batch: Batch, shape: torch.Size, rows: Sequence[int], lengths: Tensor, names: Sequence[str]) -> Shard:
    index = torch.tensor(rows, dtype=torch.int64)
    lengths = lengths[index]
    longest = int(lengths.max()) if rows else 0
    # The place of every token in a flat [B, T].
    begins = torch.repeat_interleave(index * shape[1] - lengths.cumsum(0) + lengths, lengths)
    tokens = begins + torch.arange(len(begins))

    def pack(name: str, tensor: Tensor) -> Any:
        tensor = tensor.detach()
        if not tensor.shape or tensor.shape[0] != shape[0]:
            return tensor.cpu().numpy()
        if tensor.shape[:2] != shape:
            return tensor[index].cpu().numpy()
        if name == "extra":
            return tensor[index, :longest].cpu().contiguous().numpy()
        values = tensor.flatten(0, 1)[tokens]
        narrow = values.to(torch.int32) if values.dtype == torch.int64 else values
        return Ragged(narrow.cpu().numpy(), tensor.dtype, -1 if name == "turn_ids" else 0)

    packed = batch.map(pack)
    if packed.prompt_ids is not None:
        packed.prompt_ids = [Numbers("i", batch.prompt_ids[row]) for row in rows]
    return Shard(list(rows), lengths.numpy(), {name: getattr(packed, name) for name in names})


def deal_rows(batch: Batch, count: int, *, unit_rows: bool) -> list[list[int]]:
    """Returns the rows for each of ``count`` ranks, with about equally many tokens each. A group stays together if that is even
    enough.

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
    """Distributes units to ``count`` hands so that each has about equally many tokens: the largest first, to the hand with the
    fewest. Within a hand they keep their order; with fewer units than hands some stay empty.
    """
    if count == 1:
        return [list(units)]
    loads, hands = [0] * count, [list[int]() for _ in range(count)]
    for number in sorted(range(len(units)), key=lambda i: (-sizes[i], i)):
        hand = loads.index(min(loads))
        loads[hand] += sizes[number]
        hands[hand].append(number)
    return [[list(units[number]) for number in sorted(hand)] for hand in hands]
