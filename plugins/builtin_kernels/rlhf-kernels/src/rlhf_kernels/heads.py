"""Differences of a head's log-probabilities, entropy and gradients from the host's own, on made-up states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhf_host.comparison import EXACT, ROUGH, WIDE, beyond, token_logprobs, without_tf32
from rlhf_host.protocols import TokenLogprobs, Use

TOKENS, WIDTH, VOCABULARY = 13, 32, 5003
"""Odd numbers of tokens and of logits."""
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "with_entropy": True, "chunk_tokens": 5},
    {"softcap": 20.0, "chunk_tokens": 5, "keep_logits": True},
    {"temperature": 1.3, "scale": 0.5, "softcap": 20.0, "with_entropy": True, "entropy_grad": True},
)


def head_problem(function: TokenLogprobs, use: Use) -> str | None:
    """Returns why a function's results are not those of the host's ``token_logprobs``; None if they are. Tried in 32 bits and in
    the type in which the products are computed.
    """
    for number, settings in enumerate(SETTINGS):
        for kind in dict.fromkeys((torch.float32, use.autocast or use.dtype)):
            columns = 3 if number == len(SETTINGS) - 1 else None
            own, others = (_results(one, use, kind, columns, settings) for one in (token_logprobs, function))
            if own.keys() != others.keys():
                return f"{min(own.keys() ^ others.keys())} is missing"
            for name, expected in own.items():
                gap = float((others[name].float() - expected.float()).norm() / expected.float().norm())
                if not gap <= (most := EXACT if kind in WIDE else ROUGH):
                    return f"{name} differs by {beyond(gap, most)}"
    return None


def _results(
    function: TokenLogprobs, use: Use, kind: torch.dtype, columns: int | None, settings: dict[str, Any]
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(use.device)

    shape = (TOKENS,) if columns is None else (TOKENS, columns)
    targets = torch.randint(VOCABULARY, shape, generator=generator).to(use.device)
    with torch.inference_mode(False), torch.enable_grad(), without_tf32():
        inputs = {
            "hidden": random(TOKENS, WIDTH).to(kind),
            "weight": random(VOCABULARY, WIDTH) * 0.4,
            "bias": random(VOCABULARY),
        }
        for one in inputs.values():
            one.requires_grad_()
        pulls = random(*shape), random(TOKENS)
        logprobs, entropy = function(
            inputs["hidden"], inputs["weight"], inputs["bias"], targets, compute_dtype=kind, **settings
        )
        loss = (logprobs * pulls[0]).sum()
        results = {"a log-probability": logprobs.detach()}
        if entropy is not None:
            results["the entropy"] = entropy.detach()
            loss = loss + (entropy * pulls[1]).sum() if entropy.requires_grad else loss
        gradients = torch.autograd.grad(loss, list(inputs.values()))
    return results | {f"the gradient of {name}": one for name, one in zip(inputs, gradients, strict=True)}
