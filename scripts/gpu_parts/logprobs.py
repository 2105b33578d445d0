"""Memory and time of log-probabilities and their gradients over a vocabulary of 152k."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu_parts.machine import GB, Machine, watched
from rlhf_host.models.logprobs import token_logprobs


def memory(machine: Machine) -> tuple[float, dict[str, Any]]:
    """GB beyond the hidden states of 16k tokens, the head, and the gradients of both."""
    hidden, weight, targets = _head(machine, machine.size(2048, 32))
    with watched(machine) as watch:
        logprobs = _logprobs(hidden, weight, targets)
        logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    gradients = hidden.grad.nbytes + weight.grad.nbytes
    with torch.no_grad():
        few = slice(0, 256)
        whole = torch.log_softmax((hidden[few] @ weight.to(hidden.dtype).T).float(), -1)
        gap = float((whole.gather(1, targets[few, None])[:, 0] - logprobs[few]).abs().max())
    if not gap <= 0.1:
        raise RuntimeError(f"log-probabilities are off by {gap:.2g}")
    return max(0, watch.peak_bytes - gradients) / GB, {
        "with_gradients_gb": watch.peak_bytes / GB,
        "full_logits_gb": 4 * len(hidden) * len(weight) / GB,
        "seconds": watch.seconds,
        "largest_gap": gap,
    }


def speed(machine: Machine) -> tuple[float, dict[str, Any]]:
    """Seconds of the head of a model of 7B, forward and backward, over those of its matrix products alone: logits, the same again
    in the backward pass, and the gradients of hidden states and head.
    """
    hidden, weight, targets = _head(machine, machine.size(3584, 32))
    states, low = hidden.detach(), weight.detach().to(torch.bfloat16)
    logits = states.new_empty(len(states), len(low))

    def head() -> None:
        _logprobs(hidden, weight, targets).sum().backward()
        hidden.grad = weight.grad = None

    def products() -> None:
        for _ in range(2):
            torch.mm(states, low.t(), out=logits)
        torch.mm(logits, low)
        torch.mm(logits.t(), states)

    seconds = {"head_s": _median(machine, head), "products_s": _median(machine, products)}
    tflops = 8 * logits.numel() * states.shape[1] / seconds["products_s"] / 1e12
    return seconds["head_s"] / seconds["products_s"], {**seconds, "products_tflops": tflops}


def _head(machine: Machine, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of 16k tokens, a head in float32, and the tokens that are predicted."""
    tokens, vocabulary = machine.size(16384, 64), machine.size(151_936, 512)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=machine.device, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocabulary, width, device=machine.device) * width**-0.5).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,), device=machine.device)


def _logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """As training computes them: with the entropy, which is a metric."""
    return token_logprobs(hidden, weight, None, targets, compute_dtype=torch.bfloat16, with_entropy=True)[0]


def _median(machine: Machine, run: Callable[[], None]) -> float:
    seconds = []
    for _ in range(machine.size(6, 2)):
        with watched(machine) as watch:
            run()
        seconds.append(watch.seconds)
    return statistics.median(seconds[1:])
