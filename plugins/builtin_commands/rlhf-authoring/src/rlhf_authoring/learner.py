"""An algorithm in a few lines, a reward and rows, for tests that run where no other plugin is installed.

They are given to ``rlhf_host.train`` as they are, and to the command line as ``FILE.py:NAME`` with this module's ``__file__``.
"""

from __future__ import annotations

from rlhf_host import Advantages, Batch, Experience, LossTerm, Metric, Needs, Outputs, hookimpl
from rlhf_host import functional as F

SUMS = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in ((17, 35), (38, 26), (41, 29), (56, 17))]
"""Rows that the quickstart's model solves now and then."""


class Learner:
    """RLOO: a rollout's reward less the mean reward of the others of its group (Ahmadian et al. 2024, arXiv:2402.14740), in
    the policy loss with its usual options.
    """

    @hookimpl
    def needs(self) -> Needs:
        return F.policy_needs(F.PolicyLossOptions(), min_group_size=2)

    @hookimpl
    def compute_advantages(self, experience: Experience) -> Advantages:
        values = F.leave_one_out(experience.rewards, experience.group_id, experience.episode_id)
        return Advantages(F.on_actions(values, experience.action_mask))

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        return F.policy_loss(outputs, batch, F.PolicyLossOptions())


def right_answer(text: str, label: str) -> bool:
    """Returns True where the completion is the label, but for spaces around it."""
    return text.strip() == label
