"""Passes of processes that compute slices of a line: the program of ``test_slices.py``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, MistralConfig, Qwen2Config, Qwen3Config

from rlhf_host.distributed.split.ranks import Ranks
from rlhf_host.models.activation_memory import recorded
from rlhf_host.models.passes import Passes
from rlhf_host.records.token_sets import pack_tokens, support_trace

sys.path.append(str(Path(__file__).parent))
from group import serve

SIZES = {"hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96, "max_position_embeddings": 8192}


def made(kind: str, heads: int = 8, key_heads: int = 8) -> Any:
    torch.manual_seed(0)
    shape = {**SIZES, "num_attention_heads": heads, "num_key_value_heads": key_heads, "pad_token_id": 0}
    if kind == "window":
        config: Any = MistralConfig(**shape, sliding_window=16)
    elif kind == "qwen3":
        config = Qwen3Config(**shape, head_dim=16)
    else:
        config = Qwen2Config(**shape)
    if kind == "critic":
        config.num_labels = 1
        return AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa").eval()
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def rows(shapes: list[tuple[int, int]], groups: list[int]) -> dict[str, Any]:
    dice = torch.Generator().manual_seed(1)
    prompts: dict[int, list[int]] = {}
    for (prompt, _), group in zip(shapes, groups, strict=True):
        prompts.setdefault(group, torch.randint(1, 96, (prompt,), generator=dice).tolist())
    lengths = torch.tensor([length for _, length in shapes])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.randint(1, 96, mask.shape, generator=dice) * mask
    return {
        "prompt_ids": [prompts[group] for group in groups],
        "completion_ids": ids,
        "completion_mask": mask,
        "group_id": torch.tensor(groups),
    }


def support_of(shape: tuple[int, int], ids: torch.Tensor) -> Any:
    """Returns sets of one to five tokens, among them each token."""
    sets = ([token, *(7 * step % 96 for step in range(token % 5))] for token in ids[: shape[1]].tolist())
    return support_trace(shape[0], (pack_tokens(np.unique(one)) for one in sets))


def compared(
    ranks: Ranks,
    kind: str,
    heads: tuple[int, int],
    shapes: list[tuple[int, int]],
    groups: list[int],
    outputs: list[str],
    shared_prefix: Any = "auto",
    truncated: bool = False,
) -> dict[str, Any]:
    """Returns how far outputs and gradients of slices are from those of one process, and how much each keeps."""
    batch = rows(shapes, groups)
    if truncated:
        batch["traces"] = [support_of(*row) for row in zip(shapes, batch["completion_ids"], strict=True)]
    found: dict[str, Any] = {}
    results, gradients, kept = [], [], []
    for slices in (None, ranks.slices):
        model = made(kind, *heads)
        passes = Passes(model, shared_prefix=shared_prefix, slices=slices)
        passes.prepare(max(prompt + length for prompt, length in shapes))
        with recorded(model) as bytes_:
            got = passes.forward(**batch, outputs=frozenset(outputs), entropy_grad=True)
        kept.append(sum(bytes_.values()))
        values = [getattr(got, name) for name in outputs]
        weights = [torch.linspace(0.5, 1.5, value.numel()).view_as(value) for value in values]
        sum((value * weight).sum() for value, weight in zip(values, weights, strict=True)).backward()  # type: ignore[union-attr]
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
        if slices is not None:
            ranks.sum_(grads)
        results.append(values)
        gradients.append(grads)
    found["outputs"] = max(float((a - b).abs().max().detach()) for a, b in zip(*results, strict=True))
    found["gradients"] = max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for b, a in zip(*gradients, strict=True))
    found["kept"] = kept[1] / kept[0]
    found["cost"] = Passes(made(kind, *heads), slices=ranks.slices).cost(batch["prompt_ids"], [n for _, n in shapes], groups)
    return found


def refused(ranks: Ranks, kind: str, heads: tuple[int, int]) -> str:
    """Returns why a model cannot be computed in slices."""
    try:
        assert ranks.slices is not None
        model = made(kind, *heads)
        ranks.slices.refuse(model.config, routed=False)
        Passes(model, slices=ranks.slices).prepare(32)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]), functions=globals())
