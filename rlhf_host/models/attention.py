"""transformers' sdpa attention, extended to shared-prefix lines of rows, to slices of them in several processes, and to single
queries without copies.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlhf_host.models.slices import Slices
from rlhf_host.protocols import SharedRows


def enable_shared_rows() -> None:
    """Makes transformers' sdpa attention accept ``shared_rows``. Without that argument it computes the same as before.

    It keeps the name ``sdpa``. A layer that gradient checkpointing runs again finds its attention by name, and some models
    become dense, or take another path, under a name that they do not know.
    """
    AttentionInterface.register("sdpa", attend)


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
        query, key, value = slices.to_heads(query, key, value)
        groups = SimpleNamespace(
            num_key_value_groups=query.shape[1] // key.shape[1], is_causal=getattr(module, "is_causal", True)
        )
        out, _ = attend(groups, query, key, value, attention_mask, shared_rows, **kwargs)  # type: ignore[arg-type]
        return slices.to_tokens(out), None
    if kwargs.get("softcap") is not None:
        warnings.warn(f"sdpa leaves out the softcap of {type(module).__name__}: set attn_implementation to eager", stacklevel=2)
    if shared_rows is not None:
        return _attend_rows(module, query, key, value, attention_mask, shared_rows, **kwargs), None
    same = attention_mask is None or attention_mask.shape[1:3] == (1, 1)  # for all heads
    plain = same and not kwargs.get("dropout") and kwargs.get("position_bias") is None
    if query.shape[2] == 1 and query.shape[1] > key.shape[1] and plain:
        return _attend_once(query, key, value, attention_mask, kwargs.get("scaling")), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


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
    if mask is not None and mask.numel() != 1:
        raise ValueError(f"{type(module).__name__} makes an attention mask of its own")

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
