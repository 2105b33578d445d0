"""The source of an algorithm that climbs, with the loss and the advantages that a test gives it."""

from __future__ import annotations

ON_ACTIONS = "F.on_actions(values, experience.action_mask)"
_SOURCE = '''"""An algorithm for tests."""
from rlhf_host import Advantages, AlgoNeeds, LossTerm, RoleNeed, hookimpl
from rlhf_host import functional as F

class Climb:
    """Climbs."""

    @hookimpl
    def needs(self):
        return AlgoNeeds(data="prompts", roles=(RoleNeed("actor", trainable=True, source=None),), min_group_size=2)

    @hookimpl
    def compute_advantages(self, experience):
        values = F.leave_one_out(experience.rewards, experience.group_id, experience.episode_id)
        return Advantages({advantages})

    @hookimpl
    def compute_loss(self, outputs, batch):
        import torch
        logprobs, advantages = outputs.logprobs, batch.advantages
        values = {loss}
        return [LossTerm("policy", values)]
'''


def algorithm_source(loss: str, advantages: str = ON_ACTIONS) -> str:
    """Returns the module of the class ``Climb``.

    Args:
        loss: expression of ``logprobs`` and ``advantages``.
        advantages: expression of ``values``, rewards less the mean of the others of their group.
    """
    return _SOURCE.replace("{loss}", loss).replace("{advantages}", advantages)
