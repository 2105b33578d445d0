"""Drawing of tokens by inverse CDF, with the log-probability of each under the distribution it was drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_host.records.episodes import Sampling

BLOCK = 256
WHOLE = 2048
"""Largest vocabulary that is scanned in one piece; larger ones are scanned first by blocks."""


class Sampler:
    """The sampling parameters of a batch's rows, as tensors; rows leave through ``keep``."""

    def __init__(self, rows: Sequence[Sampling], device: torch.device):
        self.greedy = torch.tensor([row.temperature == 0 for row in rows], device=device)
        self.temperature = torch.tensor([row.temperature or 1.0 for row in rows], dtype=torch.float32, device=device)
        self.top_k = torch.tensor([row.top_k for row in rows], device=device)
        self.top_p = torch.tensor([row.top_p for row in rows], dtype=torch.float64, device=device)
        self.min_p = torch.tensor([row.min_p for row in rows], dtype=torch.float32, device=device)
        # What no row of the wave uses costs nothing per step.
        self.scales = any(row.temperature not in (0, 1.0) for row in rows)
        self.some_greedy = any(row.temperature == 0 for row in rows)
        self.largest_k = max(row.top_k for row in rows)
        self.every_row_has_k = all(row.top_k > 0 for row in rows)
        self.some_top_p = any(row.top_p < 1 for row in rows)
        self.some_min_p = any(row.min_p > 0 for row in rows)
        self.tells = any(row.support for row in rows)
        self.support = torch.empty(0)
        """``[B, V]`` bool: the tokens that the last draw could have drawn, if any row wants to know."""

    def keep(self, rows: Tensor) -> None:
        for name in ("greedy", "temperature", "top_k", "top_p", "min_p"):
            setattr(self, name, getattr(self, name)[rows])

    def draw(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Samples every row of ``logits`` ``[B, V]`` with ``uniforms`` ``[B]`` float64.

        Returns tokens ``[B]`` int64 and log-probabilities ``[B]`` fp32: log-softmax in fp32 of ``logits / temperature``, over
        the kept tokens if the distribution is truncated. Greedy rows: the arg-max, 0.0. If a row's logits are not a
        distribution, its log-probability is not finite.
        """
        logits = logits.float()
        if self.scales:
            logits = logits / self.temperature[:, None]
        top = logits.amax(-1, keepdim=True)
        weights = torch.sub(logits, top).exp_()
        if self.largest_k or self.some_top_p or self.some_min_p:
            weights = self._truncate(weights)
        if self.tells:
            self.support = weights > 0
        tokens, total = inverse_cdf(weights, uniforms)
        if weights.device.type != "cpu":
            # Parallel prefix sums need not be monotonic to the last bit: a row may land on a token of weight 0.
            tokens = torch.where(weights.gather(1, tokens[:, None])[:, 0] > 0, tokens, weights.argmax(-1))
        chosen = logits.gather(1, tokens[:, None])[:, 0]
        logprobs = chosen - top[:, 0] - total.log().float()
        if self.some_greedy:
            tokens = torch.where(self.greedy, weights.argmax(-1), tokens)
            logprobs = torch.where(self.greedy & logprobs.isfinite(), 0.0, logprobs)
        return tokens, logprobs

    def _truncate(self, weights: Tensor) -> Tensor:
        """Zeroes the tokens that top-k, then top-p of the rest, then min-p leave out. ``weights`` ``[B, V]``, largest 1 in each
        row.

        The cut is a threshold on the weight, so tokens that tie with the last kept one stay.
        """
        size = weights.shape[-1]
        threshold = torch.zeros_like(weights[:, :1])
        if self.largest_k or self.some_top_p:
            width = size
            if self.every_row_has_k:
                width = min(size, self.largest_k)
            elif not self.largest_k and size > 1024 and weights.device.type == "cpu":
                width = 1024  # whether that is enough is asked below, for which a GPU would wait
            ordered = weights.topk(width).values if width < size else weights.sort(descending=True).values
            if self.largest_k:
                last = torch.where(self.top_k > 0, self.top_k, size).clamp(max=width) - 1
                threshold = ordered.gather(1, last[:, None])
            if self.some_top_p:
                remaining = ordered.double().masked_fill_(ordered < threshold, 0.0)
                mass = remaining.cumsum(-1)
                total = mass[:, -1:] if self.largest_k else weights.sum(-1, keepdim=True, dtype=torch.float64)
                wanted = self.top_p[:, None] * total
                if width < size and not self.largest_k and bool((mass[:, -1:] < wanted).any()):
                    ordered = weights.sort(descending=True).values
                    remaining = ordered.double()
                    mass = remaining.cumsum(-1)
                count = (mass - remaining < wanted).sum(-1, keepdim=True).clamp(min=1)
                nucleus = ordered.gather(1, count - 1)
                threshold = torch.where(self.top_p[:, None] < 1, torch.maximum(threshold, nucleus), threshold)
        if self.some_min_p:
            threshold = torch.maximum(threshold, self.min_p[:, None])
        return weights.masked_fill(weights < threshold, 0.0)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first token whose cumulated weight exceeds ``uniform * total``.

    ``weights`` ``[B, V]`` fp32, not negative; ``uniforms`` ``[B]`` float64 in [0, 1). Returns tokens ``[B]`` and totals ``[B]``
    float64. A token of weight 0 never qualifies, and the target stays below the total, so there always is such a token.
    """
    rows, size = weights.shape
    if size <= WHOLE:
        return _scan(weights.double(), uniforms, None)
    blocks = (weights if size % BLOCK == 0 else F.pad(weights, (0, -size % BLOCK))).view(rows, -1, BLOCK)
    sums = blocks.sum(-1).double()
    block, total = _scan(sums, uniforms, None)
    before = sums.cumsum(-1).gather(1, block[:, None])[:, 0] - sums.gather(1, block[:, None])[:, 0]
    inside = blocks[torch.arange(rows, device=weights.device), block.clamp(max=blocks.shape[1] - 1)].double()
    token, _ = _scan(inside, uniforms, uniforms * total - before)
    return (block * BLOCK + token).clamp(max=size - 1), total  # beyond it only where weights are not finite


def _scan(weights: Tensor, uniforms: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor]:
    cumulated = weights.cumsum(-1)
    total = cumulated[:, -1]
    wanted = uniforms * total if target is None else target.clamp(min=0)
    wanted = torch.minimum(wanted, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulated, wanted[:, None], right=True)[:, 0]
    return index.clamp(max=weights.shape[-1] - 1), total
