"""Rows of prompts and completions as models are given them, for tests of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_host.models import attention
from rlhf_host.models.layouts import padded_layout, shared_layout, sharing_of, to_device


def model_inputs(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    shared: bool = False,
    device: torch.device | str = "cpu",
) -> tuple[dict[str, Any], Tensor]:
    """Keyword arguments for a decoder, and places ``[P]`` int64 in its flattened hidden states ``[places, H]``.

    The places are those of each row's last prompt token and of its completion, in the same order in both layouts.

    Args:
        prompts: per row, at least one token.
        completions: per row.
        shared: one line of the distinct prompts and all completions, with ``shared_rows``; else rows padded on the right.
        device: of the tensors.
    """
    tokens = torch.tensor([token for ids in completions for token in ids], dtype=torch.int64)
    lengths = [len(ids) for ids in completions]
    attention.enable()
    if shared:
        layout = shared_layout(prompts, tokens, lengths, sharing_of(prompts))
    else:
        layout = padded_layout(prompts, tokens, lengths)
    layout = to_device(layout, torch.device(device))
    return layout.inputs(), torch.cat([layout.predicts, layout.last])
