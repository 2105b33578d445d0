"""Rows of different lengths as one tensor that holds no padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The shape of right-padded rows: ``lengths[i]`` tokens of ``width`` cells."""

    lengths: np.ndarray
    """``[B]`` int64."""
    width: int
    ends: np.ndarray = field(init=False)
    """``[B]`` int64: where each row's tokens end among those of all rows."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", self.lengths.cumsum())

    @classmethod
    def of(cls, mask: Tensor) -> Rows:
        """Returns the shape that a right-padded ``completion_mask``, ``[B, T]`` bool, describes."""
        if isinstance(mask, RaggedTensor):
            return mask.rows
        return cls(mask.sum(-1).cpu().numpy().astype(np.int64), mask.shape[1])

    def __len__(self) -> int:
        return len(self.lengths)

    def same(self, other: Rows) -> bool:
        return self is other or (self.width == other.width and np.array_equal(self.lengths, other.lengths))

    @property
    def count(self) -> int:
        """Number of tokens of all rows."""
        return int(self.ends[-1]) if len(self) else 0

    @property
    def padding(self) -> np.ndarray:
        """``[B]`` int64: cells of each row that hold no token."""
        return self.width - self.lengths

    def slice(self, row: int) -> slice:
        """Returns the places of a row's tokens among those of all rows."""
        end = int(self.ends[row])
        return slice(end - int(self.lengths[row]), end)

    def select(self, index: Sequence[int] | np.ndarray, width: int) -> Rows:
        return Rows(self.lengths[np.asarray(index, dtype=np.int64)], width)

    def zeros(self, *rest: int, dtype: torch.dtype = torch.float32) -> RaggedTensor:
        """Returns ``[B, T, *rest]`` of zeros."""
        return RaggedTensor(torch.zeros(self.count, *rest, dtype=dtype), self)

    def mask(self) -> RaggedTensor:
        """Returns ``[B, T]`` bool: true at tokens."""
        return RaggedTensor(torch.ones(1, dtype=torch.bool).expand(self.count), self)

    def held_by(self, tensor: Tensor) -> RaggedTensor | None:
        """Returns the tensor if it holds these rows without padding. One whose rows were chosen or ordered anew holds others."""
        return tensor if isinstance(tensor, RaggedTensor) and tensor.whole is None and tensor.rows.same(self) else None

    def ragged(self, tensor: Tensor) -> RaggedTensor:
        """Returns a tensor ``[B, T, ...]`` of these rows with 0 at padding."""
        ours = self.held_by(tensor)
        if ours is not None and not bool(ours.fill.any()):
            return ours
        return RaggedTensor(self.tokens(tensor), self)

    def tokens(self, tensor: Tensor) -> Tensor:
        """Returns the tokens ``[N, ...]`` of a tensor ``[B, T, ...]`` of these rows."""
        ours = self.held_by(tensor)
        if ours is not None:
            return ours.tokens
        tensor = padded(tensor)
        parts = [row[:length] for row, length in zip(tensor, self.lengths.tolist(), strict=True)]
        return torch.cat(parts) if parts else tensor.new_zeros(0, *tensor.shape[2:])

    def each(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yields the tokens of each row of a tensor ``[B, T, ...]``, on the same memory where it can."""
        ours = self.held_by(tensor)
        if ours is not None:
            values = ours.stored
            yield from (values[self.slice(row)] for row in range(len(self)))
        else:
            yield from (row[:length] for row, length in zip(padded(tensor), self.lengths.tolist(), strict=True))


@dataclass(slots=True)
class _Cells:
    """The content of a ragged tensor, shared by its aliases."""

    stored: Tensor
    """``[N, ...]``: the tokens, perhaps of a narrower type than the tensor's."""
    fill: Tensor
    """``[1, 1, ...]`` or ``[B, 1, ...]``: the value of each row's padding."""
    whole: Tensor | None = None
    """The padded tensor, if something has written to it or holds a part of it. It counts then."""


class RaggedTensor(Tensor):
    """A right-padded tensor ``[B, T, ...]`` that holds the tokens of its rows, and one value for all padding of a row.

    Every operation has the result that it has with the padded tensor. Operations on single elements and many reductions are
    computed on tokens, and are ragged too. Any other pads first, and gives a plain tensor. An operation that writes to the
    tensor, or returns a part of it, makes it padded for good.

    Args:
        values: ``[N, ...]``: the tokens, one row after the other.
        rows: the shape.
        fill: value at padding: a number, or ``[B, 1, ...]``.
        dtype: the tensor's type; ``values`` may be of one that takes less memory. Default: that of ``values``.
    """

    rows: Rows
    _cells: _Cells

    @staticmethod
    def __new__(
        cls, values: Tensor, rows: Rows, fill: float | Tensor = 0, dtype: torch.dtype | None = None, cells: _Cells | None = None
    ) -> Self:
        shape = (len(rows), rows.width, *values.shape[1:])
        dtype = values.dtype if dtype is None else dtype
        tensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=values.device)  # type: ignore[attr-defined]
        if not isinstance(fill, Tensor):
            fill = torch.full((1,) * len(shape), fill, dtype=dtype, device=values.device)
        tensor.rows, tensor._cells = rows, _Cells(values, fill) if cells is None else cells
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def tokens(self) -> Tensor:
        """``[N, ...]``: the tokens of all rows. To read."""
        return self.stored.to(self.dtype)

    @property
    def stored(self) -> Tensor:
        """``[N, ...]``: the tokens, perhaps of a narrower type. To read."""
        return self._cells.stored

    @property
    def fill(self) -> Tensor:
        """``[1, 1, ...]`` or ``[B, 1, ...]``: the value of each row's padding."""
        return self._cells.fill

    @property
    def whole(self) -> Tensor | None:
        """The padded tensor, if that holds the content."""
        return self._cells.whole

    def padded(self, index: Sequence[int] | None = None, width: int | None = None) -> Tensor:
        """Returns the padded tensor, not to write to: all rows or some, cut to a width."""
        index = range(len(self.rows)) if index is None else index
        width = self.rows.width if width is None else width
        if self.whole is not None:
            return self.whole[list(index), :width]
        shape = (len(index), width, *self.shape[2:])
        if bool(self.fill.any()):
            fill = self.fill if len(self.fill) == 1 else self.fill[list(index)]
            out = fill.to(self.dtype).expand(shape).contiguous()
        else:  # where nothing is written zeros take no memory
            out = torch.zeros(shape, dtype=self.dtype, device=self.device)
        for place, row in enumerate(index):
            tokens = self.stored[self.rows.slice(row)][:width]
            out[place, : len(tokens)] = tokens
        return out

    def settle(self) -> Tensor:
        """Returns the padded tensor, which holds the content from now on."""
        if self._cells.whole is None:
            self._cells.whole = self.padded()
            self._cells.stored = self._cells.stored[:0]
        return self._cells.whole

    def select_rows(self, index: Sequence[int], width: int | None = None) -> Tensor:
        """Returns some rows, in that order, cut to a width."""
        width = self.rows.width if width is None else width
        longest = self.rows.lengths[np.asarray(index, dtype=np.int64)].max(initial=0)
        if self.whole is not None or longest > width:
            return self.padded(index, width)
        parts = [self.stored[self.rows.slice(row)] for row in index]
        stored = torch.cat(parts) if parts else self.stored[:0]
        fill = self.fill if len(self.fill) == 1 else self.fill[list(index)]
        return RaggedTensor(stored, self.rows.select(index, width), fill, self.dtype)

    def put_rows(self, index: Sequence[int], part: Tensor) -> None:
        """Writes rows: ``part`` is ``[b, t, ...]``, or their tokens ``[n, ...]`` one row after the other."""
        assert self.whole is None
        by_row = part.dim() == self.dim()
        begin = 0
        for place, row in enumerate(index):
            length = int(self.rows.lengths[row])
            self.stored[self.rows.slice(row)] = part[place, :length] if by_row else part[begin : begin + length]
            begin += length

    def numpy(self, *, force: bool = False) -> np.ndarray:
        return self.settle().numpy(force=force)

    def __array__(self, *arguments: Any, **named: Any) -> np.ndarray:
        return np.asarray(self.numpy(), *arguments, **named)

    # What follows reads a tensor's memory without asking for an operation, and would end the process here.

    def __dlpack__(self, *arguments: Any, **named: Any) -> Any:
        return self.settle().__dlpack__(*arguments, **named)

    def apply_(self, function: Any) -> Tensor:  # type: ignore[override]
        return self.settle().apply_(function)

    def map_(self, tensor: Tensor, function: Any) -> Tensor:
        return self.settle().map_(padded(tensor), function)

    def share_memory_(self) -> Tensor:  # type: ignore[override]
        return self.settle().share_memory_()

    def data_ptr(self) -> int:
        return self.settle().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.settle().untyped_storage()

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise TypeError("data of a batch's tensor cannot be replaced: write to it (x.copy_(y)), or set the batch's field")

    def tolist(self) -> list[Any]:
        return self.padded().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.padded())

    def __copy__(self) -> Tensor:
        return self.detach()

    def __deepcopy__(self, memo: object) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.whole is not None:
            return self.whole.__reduce_ex__(protocol)
        stored = self.stored
        one = stored.dim() == 1 and stored.stride() == (0,)
        return _restored, (
            stored[:1].clone() if one else stored,
            one,
            self.rows.lengths,
            self.rows.width,
            self.fill,
            self.dtype,
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        from rlhf_host.records.ragged_operations import on_padded, on_tokens

        kwargs = kwargs or {}
        result = on_tokens(func, args, kwargs)
        return on_padded(func, args, kwargs) if result is NotImplemented else result


def padded(tensor: Tensor) -> Tensor:
    """Returns the tensor, or the padded form of a ragged one, not to write to."""
    return tensor.padded() if isinstance(tensor, RaggedTensor) else tensor


def _restored(stored: Tensor, one: bool, lengths: np.ndarray, width: int, fill: Tensor, dtype: torch.dtype) -> RaggedTensor:
    rows = Rows(lengths, width)
    return RaggedTensor(stored.expand(rows.count) if one else stored, rows, fill, dtype)
