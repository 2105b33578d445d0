"""OPO: the baseline with the least variance, a mean of rewards weighted by lengths (arXiv:2505.23585)."""

from __future__ import annotations

from rlhf_host import Advantages, Experience, hookimpl
from rlhf_host import functional as F
from rlhf_plugin_group_methods.group import Estimator, rewards_of


class OPO(Estimator):
    """OPO: rewards minus the group's mean, in which long answers count more: the baseline of least variance (arXiv:2505.23585)."""

    Options = F.PolicyLossOptions

    @hookimpl
    def compute_advantages(self, experience: Experience) -> Advantages:
        """Computes ``A_i = R̃_i − Σ_g |y_j|·R̃_j / Σ_g |y_j|`` on every action token (eq. 7). ``j`` is an episode, ``|y_j|`` the
        number of its action tokens, ``R̃_j`` the mean over its rows.
        """
        import torch

        mask, ids, episodes = experience.action_mask, experience.group_id, experience.episode_id
        centred = F.group_normalize(rewards_of(experience), ids, episodes, std="none")  # 0 where all are equal
        groups, lengths = torch.unique(ids, return_inverse=True)[1], mask.sum(-1).double()
        weighted, whole = (
            torch.zeros(int(groups.max()) + 1, dtype=torch.float64).index_add(0, groups, each)
            for each in (lengths * F.group_mean(centred, episodes), lengths)
        )
        return Advantages(F.on_actions(centred - (weighted / whole.clamp(min=1))[groups], mask))
