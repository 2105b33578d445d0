"""Sampling from the geometric mixture of two models: the decoders of both, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from rlhf_host.protocols import Decoder, Kernels, Use


class MixedKernels:
    """Kernels whose decoders sample from ``p ∝ p_other^(1 − share)·p_model^share``, token by token.

    Args:
        other: the second model; its weights may change as those of the engine's own do.
    """

    def __init__(self, kernels: Kernels, other: nn.Module, share: float):
        self.module, self.like, self.token_logprobs = kernels.module, kernels.like, kernels.token_logprobs
        self._kernels, self._other, self._share = kernels, other, share

    def decoder(self, model: nn.Module, use: Use, longest: int, pictured: bool = False) -> Decoder:
        own, other = (self._kernels.decoder(each, use, longest, pictured) for each in (model, self._other))
        return MixedDecoder(own, other, self._share)


class MixedDecoder:
    """Decoder with the logits ``(1 − share)·z_other + share·z_own``: at any temperature, those of the mixture."""

    def __init__(self, own: Decoder, other: Decoder, share: float):
        self.ragged = own.ragged and other.ragged
        self._both, self._share = (other, own), share

    def refresh(self) -> None:
        for decoder in self._both:
            decoder.refresh()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        return self._mixed(*(decoder.prefill(prompts) for decoder in self._both))

    def start(self, prompt_of_row: Tensor, longest: int) -> None:
        for decoder in self._both:
            decoder.start(prompt_of_row, longest)

    def step(self, tokens: Tensor) -> Tensor:
        return self._mixed(*(decoder.step(tokens) for decoder in self._both))

    def keep(self, rows: Tensor) -> None:
        for decoder in self._both:
            decoder.keep(rows)

    def _mixed(self, other: Tensor, own: Tensor) -> Tensor:
        return (1 - self._share) * other + self._share * own
