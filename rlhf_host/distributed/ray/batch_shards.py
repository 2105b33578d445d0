"""Shards: the rows of an optimizer batch, distributed over ranks by their work and sent without padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf_host.models.flops import ModelFlops
from rlhf_host.records.numbers import Numbers
from rlhf_host.records.ragged import RaggedTensor, Rows, padded
from rlhf_host.records.tensors import Batch, TopK
from rlhf_host.training.batching import UNEVEN, deal, group_rows

PASSES = ("prompt_ids", "completion_ids", "completion_mask", "group_id", "unit_id", "temperature", "images", "traces")
"""Fields of a ``Batch`` that a forward pass needs. They stay the same in a step, so they are sent once."""
UPDATES = tuple(field.name for field in dataclasses.fields(Batch) if field.name not in PASSES)
"""Fields that an update needs in addition."""


class Ragged(NamedTuple):
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
        fields["prompts"] = fields["prompts"] or {}
        seen = {role: shard.batch() for role, shard in (fields.pop("rows") or {}).items()}
        return dataclasses.replace(Batch(**fields).map(tensor), completion_mask=mask, rows=seen)


def make_shards(batch: Batch, rows_of_ranks: Sequence[Sequence[int]], names: Sequence[str]) -> Iterator[Shard]:
    """Yields each rank's fields of these names. Padding of the host's own fields is left out; fields of plugins are sent
    unchanged.

    Every field is looked at once for all ranks: a rank's part is a slice of each of its rows.
    """
    fields: dict[str, Any] = {name: getattr(batch, name) if name in names else None for name in (*PASSES, *UPDATES)}
    fields["completion_mask"] = fields["rows"] = None  # known by the lengths; batches of their own
    shape, width, count = Rows.of(batch.completion_mask), batch.completion_mask.shape[1], len(batch)

    def column(name: str, tensor: Tensor) -> _Column:
        tensor = tensor.detach()
        if not tensor.shape or tensor.shape[0] != count:
            return _Column("same", padded(tensor).cpu().numpy())
        if tensor.shape[:2] != (count, width):
            return _Column("rows", tensor.cpu().numpy())
        if name == "extra":
            return _Column("padded", tensor)
        ours = shape.held_by(tensor)
        tokens = shape.tokens(tensor) if ours is None else ours.stored
        narrow = tokens.to(torch.int32) if tokens.dtype == torch.int64 else tokens
        return _Column("tokens", narrow.cpu().numpy(), tensor.dtype, -1 if name == "turn_ids" else 0)

    columns = Batch(**fields).map(column)
    named = {name: getattr(columns, name) for name in names}
    for rows in rows_of_ranks:
        lengths, places = shape.lengths[list(rows)], [shape.slice(row) for row in rows]
        longest = int(lengths.max()) if rows else 0
        part = {name: _part(value, rows, places, longest) for name, value in named.items()}
        if "prompt_ids" in named:
            part["prompt_ids"] = [Numbers("i", batch.prompt_ids[row]) for row in rows]
        if "prompts" in named:
            part["prompts"] = {role: [Numbers("i", ids[row]) for row in rows] for role, ids in batch.prompts.items()}
        if "rows" in named:
            whole = (*PASSES, *UPDATES)
            part["rows"] = {role: next(make_shards(seen, [rows], whole)) for role, seen in batch.rows.items()}
        part |= {name: [named[name][row] for row in rows] for name in ("images", "traces") if named.get(name) is not None}
        yield Shard(list(rows), lengths, part)


@dataclass(frozen=True, slots=True)
class _Column:
    """A field of all rows."""

    kind: Literal["same", "rows", "padded", "tokens"]
    """Part of a rank: all of it, its rows, its rows as they are with padding, or its rows' tokens."""
    values: Any
    dtype: torch.dtype | None = None
    fill: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)


def _part(value: Any, rows: Sequence[int], places: Sequence[slice], longest: int) -> Any:
    """Returns a rank's part of a field, which may be a column, or a mapping or tuple of columns."""
    if isinstance(value, _Column):
        if value.kind == "tokens":
            assert value.dtype is not None
            parts = [value.values[place] for place in places]
            return Ragged(np.concatenate(parts) if parts else value.values[:0], value.dtype, value.fill)
        if value.kind == "rows":
            return value.values[list(rows)]
        if value.kind == "same":
            return value.values
        tensor = value.values
        part = tensor.padded(rows, longest) if isinstance(tensor, RaggedTensor) else tensor[list(rows), :longest]
        return part.cpu().contiguous().numpy()
    if isinstance(value, Mapping):
        return {name: _part(item, rows, places, longest) for name, item in value.items()}
    if isinstance(value, TopK):
        return TopK(*(_part(item, rows, places, longest) for item in value))
    return value


TOKENS = ModelFlops(body=1.0, head=0.0, attention=0)
"""Counts tokens in place of operations."""


def deal_rows(batch: Batch, count: int, *, unit_rows: bool, flops: ModelFlops = TOKENS) -> list[list[int]]:
    """Returns the rows for each of ``count`` ranks, with about equally much work each. A group stays together if that is even
    enough.

    Args:
        unit_rows: rows that share a ``unit_id`` must stay together.
        flops: of the model that is trained.
    """
    if count == 1:
        return [list(range(len(batch)))]
    prompts = [len(prompt) for prompt in batch.prompt_ids]
    completions: list[int] = batch.lengths.tolist()
    units = group_rows((batch.unit_id if unit_rows else batch.group_id).tolist())
    while True:
        # A unit's prompt is mostly one, which is computed once.
        sizes = [flops.work(max(prompts[i] for i in unit), [completions[i] for i in unit]) for unit in units]
        hands = deal(units, sizes, count)
        by_first = {unit[0]: size for unit, size in zip(units, sizes, strict=True)}
        loads = [sum(by_first[unit[0]] for unit in hand) for hand in hands]
        even = max(loads, default=0) <= (1 + UNEVEN) * sum(loads) / count
        if even or unit_rows or all(len(unit) == 1 for unit in units):
            return [sorted(row for unit in hand for row in unit) for hand in hands]
        units = [part for unit in units for part in (unit[: -(-len(unit) // 2)], unit[-(-len(unit) // 2) :]) if part]
