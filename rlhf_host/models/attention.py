"""transformers' sdpa and FlexAttention, extended to shared-prefix lines of rows, and to slices of them in several processes; and
sdpa to single queries without copies.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlhf_host.models.layouts import count_up
from rlhf_host.protocols import SharedRows, Slices

SHARING = ("sdpa", "flex_attention")
"""Implementations of attention that take ``shared_rows``."""

VERSIONS = 64
"""Compiled versions of FlexAttention that a process may have: one for each kind of mask, precision, form of rows and need of
gradients. Beyond torch's own limit of 8, all scores are computed in memory, and otherwise rounded.
"""


def enable_shared_rows() -> None:
    """Makes two of transformers' attentions accept ``shared_rows``. Without that argument they compute the same as before.

    They keep their names. A layer that gradient checkpointing runs again finds its attention by name, and some models become
    dense, or take another path, under a name that they do not know.
    """
    AttentionInterface.register("sdpa", attend)
    AttentionInterface.register("flex_attention", attend_blocks)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    shared_rows: SharedRows | None = None,
    slices: Slices | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes attention. ``query`` is ``[B, heads, L, D]``, ``key`` and ``value`` are ``[B, h, L, D]``; the result is ``[B, L,
    heads, D]``.

    Args:
        slices: the arguments have only this process's tokens, and so has the result.

    Raises:
        ValueError: the model uses its own mask for a shared-prefix line, whose rows that mask cannot describe.
    """
    if slices is not None:
        return slices.attend(attend, module, query, key, value, attention_mask, shared_rows, **kwargs)
    if kwargs.get("softcap") is not None:
        warnings.warn(f"sdpa leaves out the softcap of {type(module).__name__}: set attn_implementation to eager", stacklevel=2)
    if shared_rows is not None:
        return _attend_rows(module, query, key, value, attention_mask, shared_rows, **kwargs), None
    same = attention_mask is None or attention_mask.shape[1:3] == (1, 1)  # for all heads
    plain = same and not kwargs.get("dropout") and kwargs.get("position_bias") is None
    if query.shape[2] == 1 and query.shape[1] > key.shape[1] and plain:
        return _attend_once(query, key, value, attention_mask, kwargs.get("scaling")), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def attend_blocks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    shared_rows: SharedRows | None = None,
    slices: Slices | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes the same as ``attend`` by FlexAttention (https://pytorch.org/blog/flexattention/), which is told what each token of
    a shared-prefix line sees, so nothing is gathered for its row.
    """
    if slices is not None:
        return slices.attend(attend_blocks, module, query, key, value, attention_mask, shared_rows, **kwargs)
    _allow_versions()
    if shared_rows is not None:
        _refuse_mask(module, attention_mask)
        attention_mask = line_mask(shared_rows, kwargs.get("sliding_window"), query.device)
    return flex_attention_forward(module, query, key, value, attention_mask, **kwargs)[0], None


def _allow_versions() -> None:
    import torch._dynamo

    limits: Any = torch._dynamo.config  # each thread has its own
    limits.recompile_limit = max(limits.recompile_limit, VERSIONS)


def line_mask(rows: SharedRows, window: int | None, device: torch.device) -> BlockMask:
    """Returns what each token of a line sees: of its prompt and its own completion, the tokens up to itself, or of them the last
    ``window``. Made by the first layer that needs it.
    """
    key = window or 0
    if key not in rows.blocks:
        prompts, owners = torch.tensor(rows.prompts), torch.tensor(rows.owners)
        sizes = torch.cat([prompts, torch.tensor(rows.lengths)])
        starts = torch.cat([torch.zeros_like(prompts), prompts[owners]])
        place = (torch.repeat_interleave(starts, sizes) + count_up(sizes)).to(device)
        owner = torch.repeat_interleave(torch.cat([torch.arange(len(prompts)), owners]), sizes).to(device)
        branches = torch.cat([torch.full_like(prompts, -1), torch.arange(len(owners))])
        branch = torch.repeat_interleave(branches, sizes).to(device)

        def sees(_: Tensor, __: Tensor, one: Tensor, other: Tensor) -> Tensor:
            same = (owner[one] == owner[other]) & ((branch[other] < 0) | (branch[other] == branch[one]))
            distance = place[one] - place[other]
            return same & (distance >= 0) & (distance < window if window else True)

        count = len(owner)
        rows.blocks[key] = create_block_mask(sees, None, None, count, count, device=str(device), _compile=device.type == "cuda")
    return rows.blocks[key]


def _refuse_mask(module: nn.Module, mask: Any) -> None:
    if mask is not None and not (isinstance(mask, Tensor) and mask.numel() == 1):
        raise ValueError(f"{type(module).__name__} makes an attention mask of its own")


def _attend_once(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Computes attention for a single query. Its heads that share a key head become queries of that head, so keys and values
    are not copied for each.
    """
    rows, heads, _, width = query.shape
    folded = query.reshape(rows, key.shape[1], -1, width)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return out.reshape(rows, 1, heads, -1)


def _attend_rows(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rows: SharedRows, **kwargs: Any
) -> Tensor:
    _refuse_mask(module, mask)

    def gather(line: Tensor) -> Tensor:
        tokens = line[0].transpose(0, 1)
        return tokens.index_select(0, rows.gather).view(rows.count, rows.length, *tokens.shape[1:]).transpose(1, 2)

    window, seen = kwargs.get("sliding_window"), None
    if window is not None and rows.length > window:
        if window not in rows.windows:
            at = torch.arange(rows.length, device=query.device)
            distance = at[:, None] - at
            rows.windows[window] = ((distance >= 0) & (distance < window))[None, None]
        seen = rows.windows[window]
    out, _ = sdpa_attention_forward(module, gather(query), gather(key), gather(value), seen, **kwargs)
    return out.flatten(0, 1).index_select(0, rows.back)[None]
