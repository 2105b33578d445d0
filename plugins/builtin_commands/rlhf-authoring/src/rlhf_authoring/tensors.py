"""Made-up tensors for tests: batches for losses and advantages, rows as models are given them for kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_host import Experience
from rlhf_host.internals import enable_shared_rows, padded_layout, shared_layout, sharing_of, to_device


def make_batch(
    lengths: Sequence[int],
    *,
    groups: Sequence[int] | None = None,
    rewards: Sequence[float] | None = None,
    observations: bool = False,
    vocabulary: int = 16,
    seed: int = 0,
) -> Experience:
    """A batch with random tokens and log-probabilities, right-padded to the longest row.

    Args:
        lengths: completion tokens per row.
        groups: ``group_id`` per row; default: pairs of neighbours.
        rewards: per row; default: random. They lie on the last action token in ``token_rewards``.
        observations: every third token comes from the environment and starts another turn.
        vocabulary: token ids lie below it.
        seed: of everything random.
    """
    generator = torch.Generator().manual_seed(seed)
    count, width = len(lengths), max(lengths)
    position = torch.arange(width)
    completion_mask = position < torch.tensor(lengths).unsqueeze(-1)
    action_mask = completion_mask & (position % 3 != 2) if observations else completion_mask.clone()
    turn_ids = torch.where(action_mask, position // 3 if observations else torch.zeros_like(position), -1)
    ids = torch.randint(3, vocabulary, (count, width), generator=generator)
    logprobs = -torch.rand((count, width), generator=generator) - 0.1
    totals = torch.randn(count, generator=generator) if rewards is None else torch.tensor(rewards, dtype=torch.float32)
    last = action_mask.to(torch.int64).cumsum(-1).argmax(-1, keepdim=True)
    group_id = torch.tensor([row // 2 for row in range(count)] if groups is None else list(groups))
    prompts = {int(group): torch.randint(3, vocabulary, (4,), generator=generator).tolist() for group in group_id.unique()}
    return Experience(
        prompt_ids=[prompts[int(group)] for group in group_id],
        completion_ids=torch.where(completion_mask, ids, 0),
        completion_mask=completion_mask,
        action_mask=action_mask,
        loss_mask=action_mask.clone(),
        turn_ids=turn_ids,
        group_id=group_id,
        episode_id=torch.arange(count),
        unit_id=torch.arange(count),
        task_index=group_id.clone(),
        truncated=torch.zeros(count, dtype=torch.bool),
        rewards=totals,
        plugin_rewards=totals.unsqueeze(-1),
        scores=torch.full((count,), float("nan")),
        token_rewards=torch.zeros(count, width).scatter(1, last, totals.unsqueeze(-1)) * action_mask,
        sampler_logprobs=torch.where(action_mask, logprobs, 0.0),
        versions=torch.zeros((count, width), dtype=torch.int64),
        reward_names=("made_up",),
        reward_weights=(1.0,),
        max_new_tokens=width,
    )


def model_inputs(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    shared: bool = False,
    device: torch.device | str = "cpu",
) -> tuple[dict[str, Any], Tensor]:
    """Keyword arguments for a decoder, and places ``[P]`` int64 in its flattened hidden states ``[places, H]``.

    The places are those of each row's last prompt token and of its completion, in the same order in both layouts.

    Args:
        prompts: per row, at least one token.
        completions: per row.
        shared: one line of the distinct prompts and all completions, with ``shared_rows``; else rows padded on the right.
        device: of the tensors.
    """
    tokens = torch.tensor([token for ids in completions for token in ids], dtype=torch.int64)
    lengths = [len(ids) for ids in completions]
    enable_shared_rows()
    if shared:
        layout = shared_layout(prompts, tokens, lengths, sharing_of(prompts))
    else:
        layout = padded_layout(prompts, tokens, lengths)
    layout = to_device(layout, torch.device(device))
    return layout.inputs(), torch.cat([layout.predicts, layout.last])
