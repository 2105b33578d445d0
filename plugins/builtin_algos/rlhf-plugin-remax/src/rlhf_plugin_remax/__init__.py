"""ReMax: the reward of a greedy answer is the baseline of a prompt's other answers (arXiv:2310.10505)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_host import (
    Advantages,
    AlgoNeeds,
    Batch,
    Drop,
    Episode,
    Experience,
    Group,
    LossTerm,
    Metric,
    Outputs,
    Policy,
    Segment,
    Trajectory,
    UserError,
    hookimpl,
)
from rlhf_host import functional as F

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

AGENT = "remax"
GREEDY = "greedy"
"""Column that is 1 in rows of a greedy answer and 0 in all others."""
UNMARKED = "no row says whether it is greedy: the first answer of each prompt counts as the greedy one"


class WithGreedy:
    """The agent of ReMax: one question, one answer; the first answer of a prompt is greedy, and not trained."""

    @hookimpl
    async def agent_run(self, episode: Episode, policy: Policy) -> list[Trajectory]:
        """Samples one answer. Evaluations have no greedy answer beside theirs."""
        prompt = episode.task.prompt_ids or ()
        if episode.split == "eval" or episode.sample:
            await policy.generate(prompt)
            rows = policy.trajectories()
            return rows if episode.split == "eval" else [replace(row, columns={**row.columns, GREEDY: 0.0}) for row in rows]
        likeliest = replace(policy.sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        answer = await policy.fork(trainable=False).generate(prompt, likeliest)
        action = Segment("action", answer.token_ids, answer.logprobs, answer.versions)
        segments = [Segment("prompt", prompt, images=episode.task.images), action]
        ids = episode.episode_id, episode.group_id
        columns = {GREEDY: 1.0}
        return [Trajectory(*ids, episode.task, segments, answer.finish_reason, sample=episode.sample, columns=columns)]


class ReMax:
    """ReMax: REINFORCE whose baseline is the reward of the prompt's greedy answer, without a critic (arXiv:2310.10505)."""

    Options = F.PolicyLossOptions
    _saved = _warned = False

    def __init__(self, options: F.PolicyLossOptions):
        self.options = options

    @hookimpl
    def needs(self) -> AlgoNeeds:
        return F.policy_needs(self.options, min_group_size=2)

    @hookimpl
    def check_run(self, config: Mapping[str, Any]) -> None:
        """Refuses runs in which some prompts have no greedy answer."""
        self._saved = config.get("from_trajectories") is not None
        if self._saved:
            return
        if config["agent"]["name"] != AGENT:
            raise UserError(
                f"the baseline of remax is a greedy answer of one turn, which the agent {AGENT} draws, and the agent is"
                f" {config['agent']['name']}: add --agent {AGENT}, or take --algo rloo, whose baseline is the other answers"
            )
        if others := config.get("agents"):
            raise UserError(
                f"tasks of the agents {', '.join(others)} have no greedy answer, the baseline of remax: leave --agents out"
            )

    @hookimpl
    def keep_group(self, group: Group) -> bool | Drop:
        judged = {row.sample for row in group.trajectories if row.reward is not None}
        return True if 0 in judged else Drop("no_greedy_answer")

    @hookimpl
    def loss_masks(self, experience: Experience) -> Tensor:
        """Leaves greedy answers out of the loss, and groups without one."""
        greedy, above = self._above(experience)
        return experience.action_mask & (above.isfinite() & ~greedy).unsqueeze(-1)

    @hookimpl
    def compute_advantages(self, experience: Experience) -> Advantages:
        """Computes ``A_it = R_i − R_greedy + Σ_{s≥t} shaped_is`` (algorithm 1; a KL in the reward is the answer's own), 0 at
        greedy answers and in groups without one.
        """
        import torch

        greedy, above = self._above(experience)
        compared = above.isfinite() & ~greedy
        trained = experience.action_mask & compared.unsqueeze(-1)
        values = torch.where(trained, F.on_actions(above, experience.action_mask), 0.0)
        if experience.shaped is not None:
            values = values + torch.where(trained, F.suffix_sum(experience.shaped, experience.action_mask), 0.0)
        metrics = [
            Metric("remax/greedy", experience.rewards, greedy),
            Metric("remax/sampled", experience.rewards, ~greedy),
            Metric("remax/better", (above > 0).float(), compared),
        ]
        return Advantages(values, metrics=metrics)

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
        return F.policy_loss(outputs, batch, self.options)

    def _above(self, experience: Experience) -> tuple[Tensor, Tensor]:
        """Returns ``[B]`` bool, whether an answer is greedy, and ``[B]`` float64, its reward above that of its group's greedy
        answer, NaN in a group without one.
        """
        import torch

        greedy, rewards = self._is_greedy(experience), experience.rewards.double()
        groups = torch.unique(experience.group_id, return_inverse=True)[1]
        baselines = torch.full((len(groups),), torch.nan, dtype=torch.float64)
        baselines[groups[greedy]] = rewards[greedy]
        return greedy, rewards - baselines[groups]

    def _is_greedy(self, experience: Experience) -> Tensor:
        """Returns ``[B]`` bool. Raises ``UserError`` for saved answers that another agent drew."""
        import torch

        if (column := experience.columns.get(GREEDY)) is not None and not bool(column.isnan().any()):
            return column == 1
        if self._saved:
            raise UserError(
                f"saved answers do not say which of them are greedy: remax needs those of a run with --agent {AGENT}"
            )
        if not self._warned:
            self._warned = True
            log.warning("remax: %s", UNMARKED)
        return torch.tensor([row.sample == 0 for row in experience.trajectories], dtype=torch.bool)
