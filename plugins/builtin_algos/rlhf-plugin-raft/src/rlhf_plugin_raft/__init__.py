"""RAFT: of several answers to a prompt, the best are trained on (arXiv:2304.06767)."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from rlhf_rows import losses

from rlhf_host import AlgoNeeds, Batch, Drop, Group, LossTerm, Metric, Outputs, RoleNeed, Trajectory, hookimpl


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keep: PositiveInt = Field(1, description="how many of a prompt's answers are trained on, the best first")
    min_reward: float | None = Field(None, description="answers with a smaller reward are not trained on; none: no limit")


class RAFT:
    """Rejection sampling: the negative log-likelihood of the best of several answers to a prompt."""

    Options = Options

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def needs(self) -> AlgoNeeds:
        # Without a limit, more answers than are kept: else there is no choice.
        least = self.options.keep + (self.options.min_reward is None)
        actor = RoleNeed("actor", trainable=True, source=None, lr=2e-5)
        return AlgoNeeds(data="prompts", roles=(actor,), min_group_size=least, weights=None)

    @hookimpl
    def keep_group(self, group: Group) -> bool | Drop:
        return True if self._best(group) else Drop("below_min_reward")

    @hookimpl
    def make_rows(self, groups: Sequence[Group]) -> list[Trajectory]:
        """Returns the ``keep`` best episodes of each group; of equal ones the earlier samples."""
        return [row for group in groups for row in self._best(group)]

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        """Computes ``−log π`` of the chosen answers, a mean over all their tokens."""
        return losses.supervised_loss(outputs, batch, losses.SupervisedOptions())

    def _best(self, group: Group) -> list[Trajectory]:
        limit = self.options.min_reward
        good = [(row.reward, row) for row in group.trajectories if row.reward is not None]
        ranked = sorted((item for item in good if limit is None or item[0] >= limit), key=lambda item: -item[0])
        episodes = list(dict.fromkeys(row.episode_id for _, row in ranked))[: self.options.keep]
        return [row for _, row in ranked if row.episode_id in episodes]
