"""GiGPO: turns compared with turns that met the same state (arXiv:2505.10978)."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from pydantic import Field

from rlhf_host import Advantages, Experience, Metric, Trajectory, hookimpl
from rlhf_host import functional as F
from rlhf_plugin_group_methods.group import Estimator, rewards_of

Turn = tuple[int, int]
"""Row and number of a turn."""


class GiGPOOptions(F.PolicyLossOptions):
    gamma: float = Field(0.95, ge=0, le=1, description="discount per turn of the rewards that follow a turn")
    step_coef: float = Field(1.0, ge=0, description="weight of the advantage among turns at the same state")
    std: Literal["group", "none"] = Field(
        "none", description="divide both advantages by their standard deviation, or not at all"
    )
    std_eps: float = Field(1e-6, ge=0, description="added to the standard deviations")


class GiGPO(Estimator):
    """GiGPO: for agents; a turn is compared with the turns of its group that answered the same observation (arXiv:2505.10978)."""

    Options = GiGPOOptions
    options: GiGPOOptions

    @hookimpl
    def compute_advantages(self, experience: Experience) -> Advantages:
        """Computes ``A = A^E + ω·A^S``. ``A^E`` is ``R̃_i − mean_g R̃``; ``A^S`` the discounted sum of the rewards from a turn on,
        minus its mean over the turns of the group that answered the same observation. With ``std group`` each is divided by its
        standard deviation (eqs. 3 to 8).
        """
        import torch

        mask, options = experience.action_mask, self.options
        groups, episodes = experience.group_id, experience.episode_id
        whole = F.group_normalize(rewards_of(experience), groups, episodes, std=options.std, eps=options.std_eps)
        states, returns = turns_of(experience, options.gamma)
        names = {state: number for number, state in enumerate(dict.fromkeys(states.values()))}
        places = list(states)
        values = torch.tensor([returns[place] for place in places], dtype=torch.float64)
        same = torch.tensor([names[states[place]] for place in places], dtype=torch.int64)
        steps = F.group_normalize(values, same, std=options.std, eps=options.std_eps)
        advantages = F.on_actions(whole, mask)
        for (row, turn), value in zip(places, steps.tolist(), strict=True):
            at = mask[row] & (experience.turn_ids[row] == turn)
            advantages[row] = torch.where(at, advantages[row] + options.step_coef * value, advantages[row])
        shared = torch.bincount(same)[same] > 1
        return Advantages(advantages, metrics=[Metric("gigpo/shared_states", shared.double())])


def turns_of(experience: Experience, gamma: float) -> tuple[dict[Turn, tuple[object, ...]], dict[Turn, float]]:
    """Returns, for each turn, the state that it answered (the group, and the tokens before it that the policy did not write), and
    the discounted sum of the rewards from it on.
    """
    states, returns = dict[Turn, tuple[object, ...]](), dict[Turn, float]()
    groups = experience.group_id.tolist()
    shaped = experience.token_rewards if experience.shaped is None else experience.token_rewards + experience.shaped
    for row, trajectory in enumerate(experience.trajectories):
        observed = list(observations(trajectory))
        rewards = defaultdict[int, float](float)
        ids, given = experience.turn_ids[row].tolist(), shaped[row].tolist()
        for turn, reward, action in zip(ids, given, experience.action_mask[row].tolist(), strict=True):
            if action:
                rewards[turn] += reward
        to_go = 0.0
        for turn in reversed(range(len(observed))):
            to_go = rewards[turn] + gamma * to_go
            states[row, turn], returns[row, turn] = (groups[row], *observed[turn]), to_go
    return states, returns


def observations(trajectory: Trajectory) -> list[tuple[int, ...]]:
    """Returns, for each turn, the tokens since the turn before it: of the prompt, or of the observation."""
    found, seen = [], list[int]()
    for segment in trajectory.segments:
        if segment.kind == "action":
            found.append(tuple(seen))
            seen = []
        else:
            seen += segment.token_ids
    return found
