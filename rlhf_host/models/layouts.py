"""Layouts of model inputs, made from rows of prompts and completions.

``padded``: one right-padded row per completion. Causal attention needs no mask then: padding comes after every token that
counts.

``shared``: one line that holds every distinct prompt once and then every completion, without padding. Everything that works
token by token (projections, MLPs, norms) runs on that line; only the attention sees rows, gathered as in ``padded``
(``models/attention.py``). So it is the same arithmetic in the same kernel and needs no mask, and a prompt's keys and values sum
the gradients of its completions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_host.protocols import SharedRows


@dataclass(frozen=True, slots=True)
class Places:
    """The pictures of a layout (``models/pictures.py``)."""

    seen: Any
    """The distinct pictures of the pass; None with ``alone``."""
    features: Tensor
    """``[P]`` int64: the feature at each placeholder token, in the order of the flattened layout."""
    types: Tensor
    """``[B, L]``, or ``[1, N]``: 1 at placeholders of pictures."""
    alone: Mapping[str, Tensor] | None = None
    """Tensors that the tower takes for a row that the model computes by itself, for trials; then no features are given."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A model input, and positions in its flattened hidden states ``[places, H]``."""

    input_ids: Tensor
    """``[B, L]``, or ``[1, N]`` in the shared layout."""
    predicts: Tensor
    """``[C]``: place that predicts each completion token, in the order of ``completion_ids[completion_mask]``."""
    last: Tensor
    """``[B]``: place of each row's last token."""
    position_ids: Tensor | None = None
    """``[B, L]``, or ``[3, B, L]`` for models that place pictures; None: they count up in each row."""
    rows: SharedRows | None = None
    pictures: Places | None = None

    def inputs(self) -> dict[str, Any]:
        """Returns the keyword arguments for a decoder."""
        if self.rows is None:
            positions = {} if self.position_ids is None else {"position_ids": self.position_ids}
            return {"input_ids": self.input_ids, **positions}
        # A 4-D mask is handed on as it is, so transformers builds none out of the restarting positions.
        unused = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=self.input_ids.device)
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": unused,
            "shared_rows": self.rows,
        }


@dataclass(frozen=True, slots=True)
class Line:
    """Rows as a model gets them: one layout, or one for each row."""

    compute: Any
    layouts: Sequence[Layout]
    predicts: Tensor
    """``[C]``: place of the state that predicts each completion token."""
    last: Tensor
    """``[B]``: place of each row's last token."""
    scored: Tensor
    """``[B]``: place where each row's score is read."""
    own: Tensor
    """``[C]``: place of each completion token, for a model with a scalar head."""
    mask: Tensor
    """``[B, T]`` bool, on the CPU."""
    at: Tensor
    """``[C]``: place of each completion token in the flattened ``mask``."""
    targets: Tensor
    """``[C]``: the completion tokens."""
    support: np.ndarray | None = None
    """``[C]``: the tokens that could be drawn in place of each completion token (``records/token_sets.py``)."""
    exact: bool = False
    """True if computed in 32 bits, for a trial."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Surrounds the layers, but of a trial."""

    @property
    def shares(self) -> bool:
        """True for one line of rows that may share prompts."""
        return self.layouts[0].rows is not None

    def spread(self, values: Tensor) -> Tensor:
        """Converts ``[C, ...]`` to ``[B, T, ...]``, with zeros elsewhere."""
        if len(values) < self.mask.numel():
            values = values.new_zeros((self.mask.numel(), *values.shape[1:])).index_copy(0, self.at, values)
        return values.view(*self.mask.shape, *values.shape[1:])


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of prompt and completion, on the CPU."""

    prompt_ids: Sequence[Sequence[int]]
    completions: Tensor
    """``[C]``."""
    mask: Tensor
    """``[B, T]`` bool."""
    read_whole: bool
    """Something is read at completion tokens and at each row's end too, not only where tokens are predicted."""
    pad: int | None
    images: Sequence[Sequence[Any]] | None = None
    """The pictures of each row."""
    place: Callable[[Layout, Sequence[Sequence[Any]]], Layout] | None = None
    """Puts the rows' pictures into a layout."""

    def line(self, compute: Any, make: Callable[..., Layout], *, alone: bool, device: torch.device) -> Line:
        """Returns the rows in a layout on a device.

        Args:
            alone: each row has a layout of its own.
        """
        lengths = self.mask.sum(-1).tolist()
        rows = [(self.prompt_ids, self.completions, lengths)]
        parts = self.completions.split(lengths)
        if alone:
            rows = [([ids], part, [len(part)]) for ids, part in zip(self.prompt_ids, parts, strict=True)]
        layouts = [make(*row) for row in rows]
        if self.place is not None and self.images is not None:
            images = [[own] for own in self.images] if alone else [self.images]
            layouts = [self.place(layout, own) for layout, own in zip(layouts, images, strict=True)]
        predicts, last = all_positions(layouts)
        scored, own = last, predicts
        if self.read_whole:
            own = own_positions(predicts, last, lengths)
            tokens = ([*ids, *part.tolist()] for ids, part in zip(self.prompt_ids, parts, strict=True))
            scored = score_positions(layouts, tokens, self.pad)
        places = (predicts, last, scored, own, self.mask.flatten().nonzero().squeeze(-1), self.completions)
        predicts, last, scored, own, at, targets = (place.to(device, non_blocking=True) for place in places)
        layouts = [to_device(layout, device) for layout in layouts]
        return Line(compute, layouts, predicts, last, scored, own, self.mask, at, targets)


def padded_layout(prompt_ids: Sequence[Sequence[int]], completions: Tensor, lengths: Sequence[int]) -> Layout:
    """Returns one right-padded row per completion.

    Args:
        prompt_ids: one per row, not empty.
        completions: ``[C]``, the completion tokens of all rows, one after the other.
        lengths: number of completion tokens of each row.
    """
    prompts, sizes = torch.tensor([len(ids) for ids in prompt_ids]), torch.tensor(lengths, dtype=torch.int64)
    ends = prompts + sizes
    width = int(ends.max())
    column = torch.arange(width)
    in_prompt = column < prompts[:, None]
    input_ids = torch.zeros(len(prompt_ids), width, dtype=torch.int64)
    input_ids[in_prompt] = torch.tensor([token for ids in prompt_ids for token in ids])
    input_ids[~in_prompt & (column < ends[:, None])] = completions
    starts = torch.arange(len(prompt_ids)) * width
    predicts = torch.repeat_interleave(starts + prompts - 1, sizes) + count_up(sizes)
    return Layout(input_ids, predicts, starts + ends - 1)


def shared_layout(
    prompt_ids: Sequence[Sequence[int]], completions: Tensor, lengths: Sequence[int], sharing: Sequence[int]
) -> Layout:
    """Returns one line of distinct prompts and completions.

    Args:
        sharing: a number per row; rows with equal numbers have the same prompt (see ``sharing_of``).
    """
    first: dict[int, int] = {}
    for row, number in enumerate(sharing):
        first.setdefault(number, row)
    unique = [prompt_ids[row] for row in first.values()]
    owner = torch.tensor(list(sharing))
    unique_sizes, sizes = torch.tensor([len(ids) for ids in unique]), torch.tensor(lengths, dtype=torch.int64)
    prompts = unique_sizes[owner]
    ends = prompts + sizes
    width, total = int(ends.max()), int(unique_sizes.sum())
    prompt_starts = (unique_sizes.cumsum(0) - unique_sizes)[owner]
    starts = total + sizes.cumsum(0) - sizes

    column = torch.arange(width)
    gather = torch.where(column < prompts[:, None], prompt_starts[:, None] + column, (starts - prompts)[:, None] + column)
    gather[column >= ends[:, None]] = 0
    line_starts = torch.arange(len(prompt_ids)) * width
    first_starts = line_starts[torch.tensor(list(first.values()))]
    prompt_places = torch.repeat_interleave(first_starts, unique_sizes) + count_up(unique_sizes)
    completion_places = torch.repeat_interleave(line_starts + prompts, sizes) + count_up(sizes)

    steps = count_up(sizes)
    before = torch.where(
        steps == 0, torch.repeat_interleave(prompt_starts + prompts, sizes), torch.repeat_interleave(starts, sizes) + steps
    )
    return Layout(
        input_ids=torch.cat([torch.tensor([token for ids in unique for token in ids]), completions])[None],
        predicts=before - 1,
        last=torch.where(sizes == 0, prompt_starts + prompts, starts + sizes) - 1,
        position_ids=torch.cat([count_up(unique_sizes), torch.repeat_interleave(prompts, sizes) + steps])[None],
        rows=SharedRows(
            len(prompt_ids),
            width,
            gather.flatten(),
            torch.cat([prompt_places, completion_places]),
            unique_sizes.tolist(),
            list(lengths),
            list(sharing),
        ),
    )


def without_last(
    make: Callable[[Sequence[Sequence[int]], Tensor, Sequence[int]], Layout],
    prompt_ids: Sequence[Sequence[int]],
    completions: Tensor,
    lengths: Sequence[int],
) -> Layout:
    """Returns a layout without each row's last token, if nothing is read from it: it is predicted from the place before it."""
    sizes = torch.tensor(lengths)
    is_last = torch.zeros(len(completions), dtype=torch.bool)
    is_last[sizes.cumsum(0)[sizes > 0] - 1] = True
    layout = make(prompt_ids, completions[~is_last], [max(0, length - 1) for length in lengths])
    predicts = torch.empty(len(completions), dtype=torch.int64)
    predicts[is_last] = layout.last[sizes > 0]
    predicts[~is_last] = layout.predicts
    return replace(layout, predicts=predicts)


def all_positions(layouts: Sequence[Layout]) -> tuple[Tensor, Tensor]:
    """Returns ``predicts`` and ``last`` over the hidden states of all layouts, one after the other."""
    starts = itertools.accumulate((layout.input_ids.numel() for layout in layouts), initial=0)
    places = [(layout.predicts + start, layout.last + start) for layout, start in zip(layouts, starts, strict=False)]
    return torch.cat([predicts for predicts, _ in places]), torch.cat([last for _, last in places])


def own_positions(predicts: Tensor, last: Tensor, lengths: Sequence[int]) -> Tensor:
    """Returns ``[C]``: the place of each completion token. The next token is predicted there; after the last one, none.

    Args:
        predicts: ``[C]``, of layouts with all tokens.
        last: ``[B]``.
        lengths: number of completion tokens of each row.
    """
    sizes = torch.tensor(lengths)
    own, some = predicts.roll(-1), sizes > 0
    own[sizes.cumsum(0)[some] - 1] = last[some]
    return own


def score_positions(layouts: Sequence[Layout], rows: Iterable[Sequence[int]], pad: int | None) -> Tensor:
    """Returns ``[B]``, over the same states: the place where transformers' sequence classification reads each row's score. It
    is the last token that is not ``pad``, else the first.
    """
    read = ((place for place in reversed(range(len(ids))) if ids[place] != pad) for ids in rows)
    places, start = [], 0
    for layout in layouts:
        width = layout.input_ids.shape[1] if layout.rows is None else layout.rows.length
        own = layout.last.new_tensor([row * width + next(next(read), 0) for row in range(len(layout.last))])
        places.append(start + (own if layout.rows is None else layout.rows.gather[own]))
        start += layout.input_ids.numel()
    return torch.cat(places)


def sharing_of(
    prompt_ids: Sequence[Sequence[int]], group_id: Sequence[int] | None = None, images: Sequence[Sequence[Any]] | None = None
) -> list[int]:
    """Returns a number per row, equal for rows of one group with the same prompt (a group's later turns may have others).

    Args:
        images: the pictures of each prompt, whose tokens do not tell one from another.
    """
    groups = group_id if group_id is not None else [0] * len(prompt_ids)
    seen = images if images is not None else [()] * len(prompt_ids)
    numbers: dict[Any, int] = {}
    return [
        numbers.setdefault((group, tuple(ids), tuple(own)), len(numbers))
        for group, ids, own in zip(groups, prompt_ids, seen, strict=True)
    ]


def rows_in(layout: Layout) -> list[list[int]]:
    """Returns the tokens of each row, without padding."""
    if (shared := layout.rows) is not None:
        table = layout.input_ids[0].index_select(0, shared.gather).view(shared.count, shared.length)
        sizes = [shared.prompts[owner] + own for owner, own in zip(shared.owners, shared.lengths, strict=True)]
    else:
        table = layout.input_ids
        sizes = (layout.last - torch.arange(len(table)) * table.shape[1] + 1).tolist()
    return [row[:size] for row, size in zip(table.tolist(), sizes, strict=True)]


def to_device(layout: Layout, device: torch.device) -> Layout:
    """Returns the layout with its tensors on ``device``."""

    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    rows = layout.rows
    if rows is not None:
        rows = replace(rows, gather=move(rows.gather), back=move(rows.back))
    places = layout.pictures
    if places is not None:
        places = replace(places, features=move(places.features), types=move(places.types))
    return Layout(move(layout.input_ids), move(layout.predicts), move(layout.last), move(layout.position_ids), rows, places)


def count_up(sizes: Tensor) -> Tensor:
    """Counts up: ``[2, 3]`` → ``[0, 1, 0, 1, 2]``."""
    total = int(sizes.sum())
    return torch.arange(total) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
