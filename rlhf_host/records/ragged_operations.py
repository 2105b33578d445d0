"""Operations on ragged tensors: on tokens alone where that gives the padded tensor's result, else on the padded tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from rlhf_host.records.ragged import RaggedTensor, Rows, padded

_Function = TypeVar("_Function", bound=Callable[..., Tensor])

PIECE = 2**20
"""Largest number of cells that are padded at once where a result is computed row by row."""

_LIKE_POINTWISE = {"_to_copy", "zeros_like", "ones_like", "full_like"}
"""Operations that are right for every element by itself, though torch does not mark them so."""
_EXACT = {"sum": np.add, "any": np.logical_or, "all": np.logical_and, "amax": np.maximum, "amin": np.minimum}
"""Reductions whose result does not depend on the order; ``sum`` for whole numbers only."""
_WHOLE = {"sum", "any", "all", "max", "min", "amax", "amin"}
"""Reductions of all elements that tokens and padding have apart."""


def by_rows(function: _Function) -> _Function:
    """Decorates a function of tensors ``[B, T]`` and ``[B]`` whose result ``[B, T]`` is computed row by row, and is 0 at padding:
    where tensors are ragged it gets some rows at a time, of similar lengths.
    """

    @functools.wraps(function)
    def call(*tensors: Tensor | None, **named: Any) -> Tensor:
        every = [*tensors, *named.values()]
        first = next((one for one in every if isinstance(one, RaggedTensor) and one.whole is None), None)
        if first is None or any(_cannot_cut(one, first.rows) for one in every):
            return function(*tensors, **named)
        rows = first.rows
        out: RaggedTensor | None = None
        for index in _chunks(rows):
            width = int(rows.lengths[index[-1]])

            def cut(value: Any, index: list[int] = index, width: int = width) -> Any:
                if isinstance(value, RaggedTensor):
                    return value.padded(index, max(1, width))
                return value[index] if isinstance(value, Tensor) and value.dim() else value

            part = function(*map(cut, tensors), **{name: cut(value) for name, value in named.items()})
            if out is None:
                out = rows.zeros(dtype=part.dtype)
            out.put_rows(index, part)
        return function(*tensors, **named) if out is None else out

    return cast(_Function, call)


def in_chunks(values: Tensor, mask: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Callable[[list[Tensor]], Tensor]]:
    """Returns a tensor ``[B, T]`` and its mask as pairs of flat pieces, without padding where they are ragged; and a function
    that puts pieces together to ``[B, T]``, with 0 at padding.
    """
    rows = values.rows if isinstance(values, RaggedTensor) and values.whole is None else None
    if rows is None or not isinstance(mask, RaggedTensor) or _cannot_cut(mask, rows):
        values, mask = padded(values), padded(mask)
        flat, shape = (values.expand(mask.shape).reshape(-1), mask.reshape(-1)), mask.shape
        return list(zip(*(one.split(PIECE) for one in flat), strict=True)), lambda parts: torch.cat(parts).view(shape)
    pieces = list(zip(rows.tokens(values).split(PIECE), rows.tokens(mask).split(PIECE), strict=True))
    return pieces, lambda parts: RaggedTensor(torch.cat(parts), rows)


def _cannot_cut(value: Any, rows: Rows) -> bool:
    if isinstance(value, RaggedTensor):
        masks_padding = value.dtype == torch.bool and bool(value.fill.any())
        return value.whole is not None or masks_padding or not value.rows.same(rows) or value.dim() != 2
    return isinstance(value, Tensor) and value.dim() > 1


def _chunks(rows: Rows) -> Iterator[list[int]]:
    """Yields the rows by length, the shortest first, as many at a time as may be padded at once."""
    order, begin = np.argsort(rows.lengths, kind="stable").tolist(), 0
    while begin < len(order):
        end = begin + 1
        while end < len(order) and (end + 1 - begin) * int(rows.lengths[order[end]]) <= PIECE:
            end += 1
        yield order[begin:end]
        begin = end


def on_padded(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the result with padded tensors. Those that the operation writes to, or returns a part of, stay padded."""
    held = {argument.name for argument in func._schema.arguments if argument.alias_info is not None}
    names = [argument.name for argument in func._schema.arguments]

    def plain(name: str, value: Any) -> Any:
        leaves, form = tree_flatten(value)
        change = RaggedTensor.settle if name in held else RaggedTensor.padded
        return tree_unflatten([change(leaf) if isinstance(leaf, RaggedTensor) else leaf for leaf in leaves], form)

    positional = [plain(name, value) for name, value in zip(names, args, strict=False)]
    return func(*positional, **{name: plain(name, value) for name, value in kwargs.items()})


def on_tokens(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the result computed without padding, or ``NotImplemented``."""
    name = func._schema.name.removeprefix("aten::")
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    ragged = [leaf for leaf in tensors if isinstance(leaf, RaggedTensor)]
    first = args[0] if args else None
    if name in ("detach", "alias") and isinstance(first, RaggedTensor):
        return RaggedTensor(first.stored, first.rows, first.fill, first.dtype, first._cells)
    if torch.Tag.inplace_view in func.tags and isinstance(first, RaggedTensor):
        raise TypeError(f"a batch's tensor cannot change its shape in place ({name}): use the function that returns a tensor")
    if func._schema.is_mutable or any(
        one.whole is not None or not one.rows.same(ragged[0].rows) or one.shape != ragged[0].shape for one in ragged
    ):
        return NotImplemented
    pointwise = torch.Tag.pointwise in func.tags or name in _LIKE_POINTWISE
    if pointwise and torch.Tag.nondeterministic_seeded not in func.tags:
        return _pointwise(func, args, kwargs, ragged[0].rows, ragged[0].dim())
    if not isinstance(first, RaggedTensor):
        return NotImplemented
    if name in ("index", "masked_select", "index_select", "masked_scatter"):
        return _chosen(func, name, args, first)
    if torch.Tag.reduction in func.tags and len(ragged) == 1:
        return _reduced(func, name, args, kwargs, first)
    return NotImplemented


def _pointwise(func: Any, args: Any, kwargs: Any, rows: Rows, dims: int) -> Any:
    leaves, form = tree_flatten((args, kwargs))
    tokens, fills = [], []
    for leaf in leaves:
        if isinstance(leaf, RaggedTensor):
            tokens.append(leaf.tokens)
            fills.append(leaf.fill)
        elif isinstance(leaf, Tensor) and leaf.dim():
            shape = (1,) * (dims - leaf.dim()) + tuple(leaf.shape)
            if len(shape) > dims or shape[0] not in (1, len(rows)) or any(size != 1 for size in shape[1:]):
                return NotImplemented
            flat = leaf.reshape(shape[0], *shape[2:])
            lengths = torch.from_numpy(rows.lengths).to(leaf.device)
            tokens.append(flat if shape[0] == 1 else flat.repeat_interleave(lengths, 0, output_size=rows.count))
            fills.append(leaf.reshape(shape))
        else:
            tokens.append(leaf)
            fills.append(leaf)

    def result(parts: list[Any]) -> Any:
        positional, named = tree_unflatten(parts, form)
        return func(*positional, **named)

    values = result(tokens)
    return RaggedTensor(values, rows, result(fills)) if isinstance(values, Tensor) else NotImplemented


def _chosen(func: Any, name: str, args: Any, tensor: RaggedTensor) -> Any:
    """Returns the tokens where a mask is true, or some rows."""
    index = args[1][0] if name == "index" else args[1]
    if name == "index" and len(args[1]) != 1:
        return NotImplemented
    if isinstance(index, RaggedTensor):
        if index.dtype != torch.bool or bool(index.fill.any()):
            return NotImplemented
        if name == "masked_scatter":
            return RaggedTensor(tensor.tokens.masked_scatter(index.tokens, args[2]), tensor.rows, tensor.fill)
        return _masked(tensor.tokens, index.tokens)
    of_rows = name == "index" or (name == "index_select" and args[1] in (0, -tensor.dim()))
    index = args[2] if name == "index_select" else index
    if not of_rows or not isinstance(index, Tensor) or isinstance(index, RaggedTensor) or index.dim() != 1:
        return NotImplemented
    if index.dtype == torch.bool and name == "index" and len(index) == len(tensor):
        index = index.nonzero().squeeze(-1)
    lowest = -len(tensor) if name == "index" else 0
    if index.dtype not in (torch.int64, torch.int32) or (
        len(index) and (int(index.min()) < lowest or int(index.max()) >= len(tensor))
    ):
        return NotImplemented  # torch's own error, or the old meaning of bytes as a mask
    return tensor.select_rows((index % max(1, len(tensor))).tolist())


def _masked(tokens: Tensor, mask: Tensor) -> Tensor:
    """Returns the elements where ``mask``, of the same shape, is true. Torch's own index of them would take twice the memory of
    the tokens.
    """
    chosen, begin = tokens.new_empty(int(mask.count_nonzero())), 0
    for part, counted in zip(tokens.split(PIECE), mask.split(PIECE), strict=True):
        kept = part[counted]
        chosen[begin : begin + len(kept)] = kept
        begin += len(kept)
    return chosen


def _reduced(func: Any, name: str, args: Any, kwargs: Any, tensor: RaggedTensor) -> Any:
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    dims = named.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not dims:
        return _reduced_whole(func, name, named, tensor) if tensor.dim() == 2 else NotImplemented
    if [dim % tensor.dim() for dim in dims] != [1] or tensor.dim() != 2 or not len(tensor) or not tensor.rows.width:
        return NotImplemented
    exact = name != "sum" or not tensor.dtype.is_floating_point
    if (
        name in _EXACT
        and exact
        and not tensor.dtype.is_complex
        and tensor.dtype != torch.bfloat16
        and tensor.device.type == "cpu"
    ):
        return _reduced_rows(func, name, named, tensor)
    whole: list[Tensor] = []
    size = max(1, PIECE // tensor.rows.width)
    for begin in range(0, len(tensor), size):
        # As wide as the whole: the order of a sum depends on it.
        index = range(begin, min(begin + size, len(tensor)))
        part = func(tensor.padded(index), *args[1:], **kwargs)
        parts = (part,) if isinstance(part, Tensor) else part
        # Small results between large pieces would keep the allocator from using the pieces' memory again.
        whole = whole or [one.new_empty(len(tensor), *one.shape[1:]) for one in parts]
        for out, one in zip(whole, parts, strict=True):
            out[begin : index.stop] = one
    return whole[0] if isinstance(part, Tensor) else type(part)(whole)


def _reduced_rows(func: Any, name: str, named: dict[str, Any], tensor: RaggedTensor) -> Tensor:
    """Returns ``[B]`` or ``[B, 1]``: a reduction of each row whose order does not matter."""
    rows, counted = tensor.rows, _EXACT[name]
    kind = func(tensor.fill.expand(1, 1) if len(tensor.fill) == 1 else tensor.fill[:1], **_without_self(named)).dtype
    stored = tensor.tokens
    values = (stored.bool() if name in ("any", "all") else stored).numpy()
    padding = tensor.fill.bool() if name in ("any", "all") else tensor.fill
    fill = padding.expand(len(rows), 1).squeeze(1).to(kind).numpy()
    out = fill * rows.padding if name == "sum" else fill.copy()
    some = rows.lengths > 0
    if some.any():
        begins = (rows.ends - rows.lengths)[some]
        if name == "sum" and stored.stride() == (0,):  # a mask of all tokens
            of_tokens = rows.lengths[some] * int(values[0])
        else:
            of_tokens = counted.reduceat(values, begins, dtype=np.int64 if name == "sum" else None)
        alone = rows.padding[some] == 0
        out[some] = np.where(alone & (name != "sum"), of_tokens, counted(of_tokens, out[some]))
    result = torch.from_numpy(np.ascontiguousarray(out)).to(kind)
    return result.unsqueeze(-1) if named.get("keepdim") else result


def _without_self(named: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name != "self"}


def _reduced_whole(func: Any, name: str, named: dict[str, Any], tensor: RaggedTensor) -> Any:
    """Returns the reduction of all elements."""
    if name not in _WHOLE or not tensor.numel() or named.get("keepdim"):
        return NotImplemented
    more = _without_self(named) | ({"dim": [0]} if named.get("dim") is not None else {})
    padding, tokens = torch.from_numpy(tensor.rows.padding).to(tensor.device), tensor.tokens
    fill = tensor.fill.expand(len(tensor), 1).squeeze(1)
    if name == "sum":
        total = func(tokens, **more)
        return total + (torch.where(padding > 0, fill, 0).to(total.dtype) * padding).sum().to(total.dtype)
    ends = fill[padding > 0]
    parts = [func(part, **more).reshape(1) for part in (tokens, ends) if len(part)]
    return func(torch.cat(parts), **more)
