"""Models whose decoding step can be captured: the same launches for every token, whatever the values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from rlhf_host.internals import decoder_of
from rlhf_host.protocols import Use
from rlhf_kernels_graphs.capture import CAPTURES

KINDS = {"full_attention", "sliding_attention"}
"""Kinds of layers whose state is the keys and values of their tokens."""
FOLLOWING = {"dynamic", "longrope"}
"""Kinds of rotary positions that are computed from the longest row."""


def unsuited(model: nn.Module, use: Use) -> str | None:
    """Returns why a model is not for this package, in a few words; None: try it."""
    return next(_reasons(model, use), None)


def _reasons(model: Any, use: Use) -> Iterator[str]:
    if use.purpose != "sample":
        yield "they only sample"
    if use.device.type not in CAPTURES:
        yield "CUDA graphs need CUDA"
    config = model.config.get_text_config()
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        yield "it has no head for causal language modelling"
    if config._attn_implementation != "sdpa":
        yield f"attention is {config._attn_implementation}, not sdpa"
    if any(not weight.is_floating_point() for weight in model.parameters()):
        yield "its weights are quantized"
    if others := {*(getattr(config, "layer_types", None) or ())} - KINDS:
        yield f"it has layers of the kind {min(others)}"
    decoder = decoder_of(model)
    embedding = model.get_input_embeddings()
    for name, module in decoder.named_modules():
        if any(word in type(module).__name__.lower() for word in ("expert", "moe", "router")):
            yield "which experts compute depends on the token"
        # Gradient checkpointing leaves a hook on the embedding, which changes no value.
        if module is not embedding and (module._forward_hooks or module._forward_pre_hooks):
            yield f"{name or 'the model'} has hooks, which no graph would call"
        kinds = getattr(module, "rope_type", None)
        if FOLLOWING & {*(kinds.values() if isinstance(kinds, dict) else [kinds])}:
            yield "its rotary positions follow the length of a text"
