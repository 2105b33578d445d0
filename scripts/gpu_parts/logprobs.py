"""Memory of log-probabilities and their gradients over a vocabulary of 152k."""

from __future__ import annotations

from typing import Any

import torch

from gpu_parts.machine import GB, Machine, watched
from rlhf_host.models.logprobs import token_logprobs


def memory(machine: Machine) -> tuple[float, dict[str, Any]]:
    """GB beyond the hidden states of 16k tokens, the head, and the gradients of both."""
    tokens, width, vocabulary = machine.size(16384, 64), machine.size(2048, 32), machine.size(151_936, 512)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=machine.device, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocabulary, width, device=machine.device) * width**-0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=machine.device)
    with watched(machine) as watch:
        logprobs, entropy = token_logprobs(hidden, weight, None, targets, compute_dtype=torch.bfloat16, with_entropy=True)
        logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert entropy is not None
    gradients = hidden.grad.nbytes + weight.grad.nbytes
    with torch.no_grad():
        few = slice(0, 256)
        whole = torch.log_softmax((hidden[few] @ weight.to(hidden.dtype).T).float(), -1)
        gap = float((whole.gather(1, targets[few, None])[:, 0] - logprobs[few]).abs().max())
    if not gap <= 0.1:
        raise RuntimeError(f"log-probabilities are off by {gap:.2g}")
    return max(0, watch.peak_bytes - gradients) / GB, {
        "with_gradients_gb": watch.peak_bytes / GB,
        "full_logits_gb": 4 * tokens * vocabulary / GB,
        "seconds": watch.seconds,
        "largest_gap": gap,
    }
