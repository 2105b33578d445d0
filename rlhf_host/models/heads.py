"""Language-model heads as a matrix product, so that it can be done in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_host.models.precision import in_32_bits

SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names that configurations use for the softcap."""


@dataclass(frozen=True, slots=True)
class Head:
    """``logits = softcap · tanh(scale · (hidden weightᵀ + bias) / softcap)``; without a softcap just the inner part."""

    linear: nn.Linear
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, hidden: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns ``[..., V]`` float32 logits; ``dtype`` is that of the matrix product."""
        dtype = dtype or hidden.dtype
        bias = None if self.linear.bias is None else self.linear.bias.to(dtype)
        logits = F.linear(hidden.to(dtype), self.linear.weight.to(dtype), bias)
        logits = logits.to(torch.promote_types(dtype, torch.float32)) * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def scalar_head(model: Any) -> nn.Linear | None:
    """Returns the head of a model that gives one number per token, like transformers' sequence classification models."""
    score = getattr(model, "score", None)
    return score if isinstance(score, nn.Linear) and score.out_features == 1 else None


def decoder_of(model: Any) -> Any:
    """Returns the part that turns tokens into hidden states."""
    if scalar_head(model) is not None:
        return model.base_model
    decoder = model.get_decoder()
    if decoder is not model and isinstance(decoder, PreTrainedModel) and decoder.get_output_embeddings() is not None:
        return decoder_of(decoder)  # a language model inside one that sees
    if decoder is model or not isinstance(decoder, PreTrainedModel):  # or the head, where that is called ``decoder``
        return next((part for part in model.children() if isinstance(part, PreTrainedModel)), decoder)
    return decoder


def blocks_of(model: Any) -> dict[str, nn.Module]:
    """Returns name → layer of a decoder."""
    decoder = decoder_of(model)
    lists = [(name, module) for name, module in decoder.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        return {}
    name, layers = max(lists, key=lambda item: len(item[1]))
    prefix = next(place for place, module in model.named_modules() if module is decoder)
    return {".".join(filter(None, (prefix, name, str(number)))): layer for number, layer in enumerate(layers)}


def find_head(model: Any) -> Head | None:
    """Returns the head that turns the decoder's hidden states into the model's logits, checked on a few tokens; None if there
    is none.

    Scale and softcap are read from the config, under the names that models use for them. They are accepted only if the logits
    agree: in 32 bits, or in the caller's types if the model does not run in 32 bits.
    """
    linear = model.get_output_embeddings()
    if type(linear) is not nn.Linear:  # an adapter's subclass does more than its weight says
        return None
    try:
        with torch.autocast(linear.weight.device.type, enabled=False), in_32_bits(model):
            return _agreeing(model, linear, tolerance=1e-4, noise=1e-6)
    except (RuntimeError, TypeError, ValueError):
        return _agreeing(model, linear, tolerance=2e-2, noise=8e-3)


def _agreeing(model: Any, linear: nn.Linear, tolerance: float, noise: float) -> Head | None:
    config = model.config.get_text_config()
    probe = torch.tensor([[1, 3, 2, 4, 1, 5]], device=linear.weight.device) % config.vocab_size
    logits = model(input_ids=probe, use_cache=False).logits.float()
    hidden = decoder_of(model)(input_ids=probe, use_cache=False).last_hidden_state
    if (hidden.shape[-1], logits.shape[-1]) != (linear.in_features, linear.out_features):
        return None
    softcaps = (*(getattr(config, name, None) for name in SOFTCAPS), None)
    candidates = [Head(linear, scale, softcap) for scale in _scales(model, config) for softcap in dict.fromkeys(softcaps)]
    gaps = {head: float((head(hidden) - logits).abs().max()) for head in candidates}
    size, best = float(logits.abs().max()), min(gaps.values())
    # Among those that the probe cannot tell apart, with the softcap: on small logits it hardly shows.
    return next(head for head, gap in gaps.items() if gap <= best + noise * size) if best <= tolerance * size else None


def _scales(model: Any, config: Any) -> Iterator[float]:
    yield 1.0
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier", "logits_mup_width_multiplier"):
        value = getattr(config, name, None) or getattr(model, name, None)
        if isinstance(value, int | float):
            yield float(value)
            yield 1.0 / float(value)
