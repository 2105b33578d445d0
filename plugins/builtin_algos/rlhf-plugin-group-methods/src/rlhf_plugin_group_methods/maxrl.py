"""MaxRL: advantages divided by the group's mean reward (arXiv:2602.02710)."""

from __future__ import annotations

import logging

from rlhf_host import Advantages, Experience, Metric, hookimpl
from rlhf_host import functional as F
from rlhf_plugin_group_methods.group import Estimator, rewards_of

log = logging.getLogger(__name__)


class MaxRL(Estimator):
    """MaxRL: rewards divided by the group's mean, so that rare successes count as in maximum likelihood (arXiv:2602.02710)."""

    Options = F.PolicyLossOptions
    _warned = False

    @hookimpl
    def compute_advantages(self, experience: Experience) -> Advantages:
        """Computes ``A_i = (R̃_i − mean_g R̃) / mean_g R`` on every action token (algorithm 1). Rewards are of successes, from 0: a
        group whose mean is not above 0 has no advantages.
        """
        import torch

        least = float(experience.rewards.min())
        if least < 0 and not self._warned:
            self._warned = True
            log.warning(
                "maxrl: a reward is %g: with rewards below 0 the mean of a group may be near 0, and advantages any size", least
            )
        groups, episodes = experience.group_id, experience.episode_id
        mean = F.group_mean(experience.rewards.double(), groups, episodes)
        centred = F.group_normalize(rewards_of(experience), groups, episodes, std="none")
        values = torch.where(mean > 0, centred / mean.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
        without = Metric("maxrl/without_success", (mean <= 0).double())
        return Advantages(F.on_actions(values, experience.action_mask), metrics=[without])
