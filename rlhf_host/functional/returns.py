"""Returns and advantages along a trajectory's action tokens, whitening, and the critic's loss."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rlhf_host.records.ragged_operations import by_rows, in_chunks

_MIN_VARIANCE = 1e-8


@by_rows
def gae(
    rewards: Tensor, values: Tensor, action_mask: Tensor, gamma: float = 1.0, lam: float = 1.0, bootstrap: Tensor | None = None
) -> Tensor:
    """Returns generalised advantage estimates, ``[B, T]`` float32, 0 outside ``action_mask`` (arXiv:1506.02438, eqs. 11 to 16).

    ``A_t = Σ_{l≥0} (γλ)^l·δ_{t+l}`` with ``δ_t = r_t + γ·V_{t+1} − V_t``, where ``t + 1`` is the next **action** token:
    observations do not count as steps, and their values have no effect.

    Args:
        rewards: ``[B, T]`` per token.
        values: ``[B, T]``: the critic before token t.
        action_mask: ``[B, T]`` bool.
        gamma: discount per action token.
        lam: λ.
        bootstrap: ``[B]``: the value after the last action token; ``None``: 0, because the episode ended.
    """
    order, count = _actions_first(action_mask)
    value = _take(values, action_mask, order)
    after = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)
    if bootstrap is not None:
        last = torch.arange(value.shape[1], device=value.device) == (count - 1).unsqueeze(-1)
        after = torch.where(last, bootstrap.to(torch.float64).unsqueeze(-1), after)
    delta = _take(rewards, action_mask, order) + gamma * after - value
    return _put_back(_discounted(delta, gamma * lam), action_mask, order)


@by_rows
def discounted_sum(values: Tensor, action_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Returns ``[B, T]`` float32: ``Σ_{s≥t} γ^{s−t}·x_s`` where ``s`` and ``t`` count action tokens; 0 outside ``action_mask``.

    Args:
        values: ``[B, T]`` per token; outside ``action_mask`` it may have any values.
        action_mask: ``[B, T]`` bool.
        gamma: discount per action token.
    """
    order, _ = _actions_first(action_mask)
    return _put_back(_discounted(_take(values, action_mask, order), gamma), action_mask, order)


def whiten(advantages: Tensor, mask: Tensor, center_only: bool = False) -> Tensor:
    """Returns ``[B, T]`` float32: ``(A − mean)·rsqrt(max(var, 1e-8))`` over ``mask``, population variance; 0 outside ``mask``.

    Args:
        advantages: ``[B, T]``; outside ``mask`` it may have any values.
        mask: ``[B, T]`` bool: the tokens that count in the statistics.
        center_only: subtract the mean and leave the scale.
    """
    count = mask.sum().clamp(min=1)
    whole, put_back = in_chunks(advantages, mask)  # in 64 bits a long batch would take twice its memory

    def centred(values: Tensor, counted: Tensor) -> Tensor:
        return torch.where(counted, values.to(torch.float64) - mean, 0.0)

    mean = _total(torch.where(counted, values, 0.0).to(torch.float64).sum() for values, counted in whole) / count
    scale = torch.ones_like(mean)
    if not center_only:
        variance = _total(centred(*piece).square().sum() for piece in whole) / count
        scale = variance.clamp(min=_MIN_VARIANCE).rsqrt()
    return put_back([(centred(*piece) * scale).to(torch.float32) for piece in whole])


def _total(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> Tensor:
    """Returns the critic's loss per token, ``0.5·max((V−G)², (V_old + clip(V−V_old, ±ε) − G)²)``, 0 outside ``mask``.

    As in OpenAI Baselines' PPO ("The 37 implementation details of PPO", detail 9).

    Args:
        values: ``[B, T]`` with gradient.
        old_values: ``[B, T]``: the critic's values before the first update.
        returns: ``[B, T]``: ``G``.
        mask: ``[B, T]`` bool; outside it all three may have any values.
        clip: ``ε``; ``None``: no clipping, ``0.5·(V−G)²``.
    """
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
    loss = (values - returns).square()
    if clip is not None:
        near = torch.clamp(values, old_values - clip, old_values + clip)
        loss = torch.maximum(loss, (near - returns).square())
    return 0.5 * loss


def _actions_first(action_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``[B, T]``: column indices with the action tokens first, in order; and ``[B]``: their number."""
    return torch.argsort((~action_mask).to(torch.int8), dim=-1, stable=True), action_mask.sum(-1)


def _take(values: Tensor, action_mask: Tensor, order: Tensor) -> Tensor:
    """Returns the action tokens moved to the left, zeros after them; float64."""
    return torch.where(action_mask, values, 0.0).to(torch.float64).gather(-1, order)


def _put_back(values: Tensor, action_mask: Tensor, order: Tensor) -> Tensor:
    """Reverses ``_take``; float32, 0 outside ``action_mask``."""
    return torch.where(action_mask, torch.zeros_like(values).scatter(-1, order, values), 0.0).to(torch.float32)


def _discounted(values: Tensor, rate: float) -> Tensor:
    """Returns ``Σ_{s≥t} rate^{s−t}·x_s`` along the last axis, by doubling the span that each sum covers."""
    width, span, factor = values.shape[-1], 1, rate
    while span < width:
        tail = torch.nn.functional.pad(values[..., span:], (0, span))
        values, span, factor = values + factor * tail, 2 * span, factor * factor
    return values
