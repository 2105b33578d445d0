"""Memory and time of log-probabilities and their gradients over a vocabulary of 152k."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu_parts.kernels import chosen
from gpu_parts.machine import GB, Machine, Report, Skipped, watched
from rlhf_host.models.logprobs import token_logprobs
from rlhf_host.protocols import Use


def memory(machine: Machine, report: Report) -> None:
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
    details = {
        "with_gradients_gb": watch.peak_bytes / GB,
        "full_logits_gb": 4 * len(hidden) * len(weight) / GB,
        "seconds": watch.seconds,
        "largest_gap": gap,
    }
    report(max(0, watch.peak_bytes - gradients) / GB, details)


def speed(machine: Machine, report: Report) -> None:
    """Seconds of the head of a model of 7B, forward and backward, over those of its matrix products alone: logits, the same again
    in the backward pass, and the gradients of hidden states and head. With the entropy, which is a metric, and without it; with
    logits that are kept; and with the kernels triton.
    """
    hidden, weight, targets = _head(machine, machine.size(3584, 32))
    states, low = hidden.detach(), weight.detach().to(torch.bfloat16)
    logits = states.new_empty(len(states), len(low))

    def products() -> None:
        for _ in range(2):
            torch.mm(states, low.t(), out=logits)
        torch.mm(logits, low)
        torch.mm(logits.t(), states)

    products_s = _median(machine, products)
    tflops = 8 * logits.numel() * states.shape[1] / products_s / 1e12

    def measured(figure: str, **settings: Any) -> None:
        def head() -> None:
            _logprobs(hidden, weight, targets, **settings).sum().backward()
            hidden.grad = weight.grad = None

        head_s = _median(machine, head)
        report(head_s / products_s, {"head_s": head_s, "products_s": products_s, "products_tflops": tflops}, figure)

    measured("logits")
    measured("logits-alone", with_entropy=False)
    measured("logits-kept", chunk_tokens=len(hidden))
    measured("logits-triton", function=_function_of("triton", machine))


def _head(machine: Machine, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of 16k tokens, a head in float32, and the tokens that are predicted."""
    tokens, vocabulary = machine.size(16384, 64), machine.size(151_936, 512)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=machine.device, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocabulary, width, device=machine.device) * width**-0.5).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,), device=machine.device)


def _function_of(name: str, machine: Machine) -> Any:
    """The function of heads of an installed package's kernels, compared with the host's own."""
    kernels = chosen(name)
    if not hasattr(kernels, "token_logprobs"):
        raise Skipped("kernels compute no log-probabilities in this version of the host")
    function = kernels.token_logprobs(Use(purpose="train", device=machine.device, dtype=torch.float32, autocast=torch.bfloat16))
    if function is token_logprobs:
        raise (Skipped if machine.dry else RuntimeError)(
            "; ".join(kernels.reports) or f"kernels {name!r} have no such function"
        )
    return function


def _logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    function: Any = token_logprobs,
    with_entropy: bool = True,
    chunk_tokens: int | None = None,
) -> Tensor:
    """As training computes them."""
    settings = {"compute_dtype": torch.bfloat16, "with_entropy": with_entropy, "chunk_tokens": chunk_tokens}
    logprobs: Tensor = function(hidden, weight, None, targets, **settings)[0]
    return logprobs


def _median(machine: Machine, run: Callable[[], None]) -> float:
    seconds = []
    for _ in range(machine.size(6, 2)):
        with watched(machine) as watch:
            run()
        seconds.append(watch.seconds)
    return statistics.median(seconds[1:])
