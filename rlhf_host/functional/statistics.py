"""Masked and grouped statistics, in float64 for rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_host.records.ragged_operations import by_rows
from rlhf_host.records.tensors import Experience


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Returns the sum of ``values`` where ``mask`` is true; other values may be NaN. Both have the same shape."""
    counted = torch.where(mask, values, 0.0)
    return counted.sum() if dim is None else counted.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Returns the mean of ``values`` where ``mask`` is true; 0 if nothing counts. Both have the same shape."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def on_actions(values: Tensor, action_mask: Tensor) -> Tensor:
    """Converts ``[B]`` to ``[B, T]`` float32: the row's value on every action token, 0 elsewhere."""
    return torch.where(action_mask, values.to(torch.float32).unsqueeze(-1), 0.0)


@by_rows
def suffix_sum(values: Tensor, action_mask: Tensor) -> Tensor:
    """Returns ``[B, T]``: ``Σ_{s≥t}`` of ``values`` over action tokens, 0 outside ``action_mask``."""
    sums = torch.where(action_mask, values, 0.0).to(torch.float64).flip(-1).cumsum(-1).flip(-1)
    return torch.where(action_mask, sums, 0.0).to(torch.float32)


class GroupedEpisodes:
    """Rows averaged to episodes (over an episode's trajectories), and episodes to groups."""

    def __init__(self, values: Tensor, group_id: Tensor, episode_id: Tensor | None = None):
        groups, self.group_of_row = torch.unique(group_id, return_inverse=True)
        if episode_id is None:
            episode_id = torch.arange(len(group_id), device=group_id.device)
        numbers, of_row = torch.unique(episode_id, return_inverse=True)
        pairs = self.group_of_row * len(numbers) + of_row
        episodes, self.episode_of_row = torch.unique(pairs, return_inverse=True)
        self.group_of_episode = episodes // max(1, len(numbers))
        self.count = len(groups)
        wide = values.to(torch.float64)
        rows = _sums(torch.ones_like(wide), self.episode_of_row, len(episodes))
        self.values = _sums(wide, self.episode_of_row, len(episodes)) / rows
        self.sizes = _sums(torch.ones_like(self.values), self.group_of_episode, self.count)

    def mean(self) -> Tensor:
        """Returns ``[G]``: means, computed relative to each group's first extreme so that large equal rewards cancel exactly."""
        low = self._extreme("amin")
        shifted = self.values - low[self.group_of_episode]
        return low + _sums(shifted, self.group_of_episode, self.count) / self.sizes

    def std(self) -> Tensor:
        """Returns ``[G]``: unbiased standard deviations; 0 for a group of one."""
        squares = (self.values - self.mean()[self.group_of_episode]).square()
        return (_sums(squares, self.group_of_episode, self.count) / (self.sizes - 1).clamp(min=1)).sqrt()

    def constant(self) -> Tensor:
        """Returns ``[G]`` bool: zero variance, ``max − min ≤ 1e-6·max(1, max|R|)``; a group of one is constant."""
        low, high = self._extreme("amin"), self._extreme("amax")
        scale = torch.maximum(low.abs(), high.abs()).clamp(min=1.0)
        return high - low <= 1e-6 * scale

    def _extreme(self, reduce: str) -> Tensor:
        start = torch.zeros(self.count, dtype=torch.float64, device=self.values.device)
        return start.scatter_reduce(0, self.group_of_episode, self.values, reduce, include_self=False)


def _sums(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Returns ``[count]`` float64: the sum of the values that have each index."""
    return torch.zeros(count, dtype=torch.float64, device=values.device).index_add(0, index, values)


def group_sizes(group_id: Tensor, episode_id: Tensor | None = None) -> Tensor:
    """Returns ``[B]`` int64: the number of episodes in the row's group.

    Args:
        group_id: ``[B]`` int64.
        episode_id: ``[B]`` int64; ``None``: every row is an episode.
    """
    episodes = GroupedEpisodes(torch.zeros(len(group_id), device=group_id.device), group_id, episode_id)
    return episodes.sizes[episodes.group_of_row].to(torch.int64)


def group_mean(values: Tensor, group_id: Tensor, episode_id: Tensor | None = None) -> Tensor:
    """Returns ``[B]`` float64: mean over the group's episodes, each counted once.

    Args:
        values: ``[B]`` any float.
        group_id: ``[B]`` int64; rows of a group need not be adjacent, sizes may differ.
        episode_id: ``[B]`` int64; ``None``: every row is an episode.
    """
    episodes = GroupedEpisodes(values, group_id, episode_id)
    return episodes.mean()[episodes.group_of_row]


def leave_one_out(values: Tensor, group_id: Tensor, episode_id: Tensor | None = None) -> Tensor:
    """Returns ``[B]`` float64: ``R_i − mean_{j≠i} R_j`` over the group's episodes (RLOO, arXiv:2402.14740, eq. 7).

    Exactly 0 for groups of one and for groups of zero variance. Arguments as in ``group_mean``.
    """
    episodes = GroupedEpisodes(values, group_id, episode_id)
    size = episodes.sizes[episodes.group_of_row]
    own = episodes.values[episodes.episode_of_row]
    others = (size * episodes.mean()[episodes.group_of_row] - own) / (size - 1).clamp(min=1)
    alone_or_equal = (size < 2) | episodes.constant()[episodes.group_of_row]
    return torch.where(alone_or_equal, 0.0, values.to(torch.float64) - others)


def group_normalize(
    values: Tensor, group_id: Tensor, episode_id: Tensor | None = None, std: str = "group", eps: float = 1e-6
) -> Tensor:
    """Returns ``[B]`` float64: ``(R_i − mean_g) / (std + eps)`` over the group's episodes (GRPO, arXiv:2402.03300, section
    4.1.2).

    Exactly 0 for groups of one and for groups of zero variance. First arguments as in ``group_mean``.

    Args:
        std: ``group``: the group's unbiased standard deviation; ``batch``: that of the raw values of all episodes
            (arXiv:2508.08221); ``none``: no division (Dr. GRPO, arXiv:2503.20783).
        eps: added to the standard deviation.

    Raises:
        ValueError: ``std`` is unknown.
    """
    if std not in ("group", "batch", "none"):
        raise ValueError(f"unknown std {std!r}: group, batch or none")
    episodes = GroupedEpisodes(values, group_id, episode_id)
    mean = episodes.mean()
    centred = torch.where(episodes.constant()[episodes.group_of_row], 0.0, values.double() - mean[episodes.group_of_row])
    if std == "none":
        return centred
    if std == "batch":
        scale = GroupedEpisodes(values, torch.zeros_like(group_id), episodes.episode_of_row).std()
    else:
        scale = episodes.std()[episodes.group_of_row]
    return centred / (scale + eps).clamp(min=torch.finfo(torch.float64).tiny)  # 0/0 without an eps


def turn_advantages(
    token_rewards: Tensor, turn_ids: Tensor, action_mask: Tensor, group_id: Tensor, episode_id: Tensor | None = None
) -> Tensor:
    """Returns ``[B, T]`` float32: per-turn credit, the return-to-go of the token's turn minus its mean over the group's
    trajectories that have that turn. 0 outside ``action_mask``, and exactly 0 if only one trajectory has the turn or all agree.

    Args:
        token_rewards: ``[B, T]``; summed per turn.
        turn_ids: ``[B, T]`` int64, counting from 0 in every row; ignored outside ``action_mask``.
        action_mask: ``[B, T]`` bool.
        group_id: ``[B]`` int64.
        episode_id: ``[B]`` int64; ``None``: every row is an episode.
    """
    turn_of_token = torch.where(action_mask, turn_ids, 0)
    turns = int(turn_of_token.max()) + 1 if turn_of_token.numel() else 1
    starts = torch.arange(len(turn_ids), device=turn_ids.device) * turns
    place = (turn_of_token + starts.unsqueeze(-1))[action_mask]  # of each action token's turn among all rows' turns
    empty = torch.zeros(len(turn_ids) * turns, dtype=torch.float64, device=turn_ids.device)
    present = empty.index_add(0, place, torch.ones_like(place, dtype=torch.float64)).view(-1, turns) > 0
    per_turn = empty.index_add(0, place, token_rewards[action_mask].double()).view(-1, turns)
    to_go = per_turn.flip(-1).cumsum(-1).flip(-1)
    row, turn = present.nonzero(as_tuple=True)
    group_of_row = torch.unique(group_id, return_inverse=True)[1]
    of_episode = row if episode_id is None else episode_id[row]
    credit = group_normalize(to_go[row, turn], group_of_row[row] * turns + turn, of_episode, std="none")
    of_turns = empty.view(-1, turns).index_put((row, turn), credit).view(-1)
    return torch.zeros_like(action_mask, dtype=torch.float32).masked_scatter(action_mask, of_turns[place].to(torch.float32))


def with_siblings(experience: Experience, least: int = 2) -> Tensor:
    """Returns ``[B, T]`` bool: action tokens of rows whose group has at least ``least`` episodes. Where ``needs`` have a
    ``min_group_size``, the host leaves the others out of the loss.
    """
    large = group_sizes(experience.group_id, experience.episode_id) >= least
    return experience.action_mask & large.unsqueeze(-1)
