"""Made-up batches for tests of losses and advantages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhf_host.records.tensors import Experience


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
