"""Saved trajectories as the rollouts of a run that samples nothing: step ``k`` trains on the file's ``k``-th step."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rlhf_host import Needs, ScoreContext, UserError
from rlhf_host.internals import support_metrics
from rlhf_host.runs import read_steps
from rlhf_host.settings import RunConfig
from rlhf_samples.saved_steps import check_vocabulary, judged_groups, reward_weights

if TYPE_CHECKING:
    from rlhf_host.internals import PluginManager
    from rlhf_host.sampling import Collected, RolloutSource, SavedStep


class SavedRollouts:
    """Training steps of a file.

    Args:
        config: ``from_trajectories`` names the file; its sampling settings must be those of the file.

    Raises:
        UserError: for a file that cannot be trained on as configured.
    """

    epoch = 0

    def __init__(self, config: RunConfig):
        assert config.from_trajectories is not None
        self.path = Path(config.from_trajectories)
        self._planned = config.train.steps
        self.saved = [step for step in read_steps(self.path) if step.split == "train"]
        if not self.saved:
            raise UserError(f"{self.path} has no trajectories of the split 'train'")
        configured = {alias: choice.weight for alias, choice in config.reward.items()}
        self.weights: dict[str, float] = {}
        for step in self.saved:
            self._check(step, config)
            for name, weight in reward_weights(step, configured).items():
                if (before := self.weights.setdefault(name, weight)) != weight:
                    raise UserError(f"{step.where}: the reward {name} is weighted {weight:g} here and {before:g} before")

    @property
    def steps(self) -> int:
        return len(self.saved)

    @property
    def report(self) -> list[str]:
        """Summary of what was read, for people."""
        rows = sum(len(step.rows) for step in self.saved)
        lines = [f"{rows} trajectories in {self.steps} steps from {self.path}; nothing is sampled or evaluated"]
        if self._planned is not None and self.steps < self._planned:
            lines.append(
                f"training ends with them, before train.steps {self._planned}, which the learning rate's schedule follows"
            )
        for step in self.saved:
            sizes = set(Counter(row.group_id for row in step.rows).values())
            if len(sizes) > 1:
                lines.append(
                    f"{step.where}: groups of {min(sizes)} to {max(sizes)} trajectories in step {step.step}; "
                    "trajectories.max_per_step cuts what a run writes (0: all)"
                )
                break
        return lines

    async def next_rollouts(self, context: ScoreContext) -> Collected:
        """Returns the file's groups for ``context.step``; nothing is drawn or sampled."""
        from rlhf_host.sampling import Collected, decoder

        step = self.saved[context.step - 1]
        for row in step.rows if context.tokenizer is not None else ():
            row.decode = decoder(context.tokenizer)
        collected = Collected(judged_groups(step), drawn=len({row.group_id for row in step.rows}))
        collected.note_unjudged(step.rows)
        return collected

    def state_dict(self) -> dict[str, Any]:
        return {"trajectories": self._digest(), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any], finished: Mapping[int, Any]) -> None:
        """Restores the position. Raises ``UserError`` if the file has changed."""
        if state["trajectories"] != self._digest():
            raise UserError(f"{self.path} changed since the checkpoint: resume with the file the run began with")

    def _digest(self) -> str:
        """Returns a digest of what training depends on: tokens, pictures, log-probabilities and rewards, in order."""
        digest = hashlib.blake2b(digest_size=16)
        for step in self.saved:
            for row in step.rows:
                parts = [(s.kind, s.token_ids, s.logprobs, s.versions, *(i.key for i in s.images)) for s in row.segments]
                digest.update(repr((step.step, row.group_id, row.reward, parts)).encode())
        return digest.hexdigest()

    def _check(self, step: SavedStep, config: RunConfig) -> None:
        if all(row.reward is None for row in step.rows):
            raise UserError(
                f"{step.where}: no trajectory of step {step.step} has a reward: score them with "
                f"rlhf replay {self.path} --reward NAME --output SCORED.jsonl"
            )
        for name, value in step.sampling.items():
            wanted = getattr(config.rollout, name, value)
            if wanted != value:
                flag = f"--rollout.{name.replace('_', '-')}"
                raise UserError(
                    f"{step.where}: sampled with {name} {value:g}, and rollout.{name} is {wanted:g}: set {flag} {value:g}"
                )
        judged = (row for row in step.rows if row.reward is not None)
        support_metrics(judged, needed=bool(config.rollout.truncated_by))


@dataclass(slots=True)
class SavedData:
    """``GivenData`` of a run that trains on a file."""

    rollouts: SavedRollouts
    pictured: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Raises ``UserError`` as ``SavedRollouts``, and for tokens that the actor does not have."""
        rollouts = SavedRollouts(config)
        check_vocabulary(rollouts.saved, config.roles["actor"])
        return cls(rollouts)

    @property
    def report(self) -> list[str]:
        return self.rollouts.report

    def steps(self, config: RunConfig) -> int:
        return self.rollouts.steps if config.train.steps is None else config.train.steps

    def end(self, config: RunConfig) -> tuple[int, str]:
        if self.steps(config) < self.rollouts.steps:
            return self.steps(config), "; raise --train.steps to continue"
        return self.rollouts.steps, f": {self.rollouts.path} has no more steps"

    def computed(self, config: RunConfig, manager: PluginManager, needs: Needs) -> Sequence[str]:
        return ()

    def source(self, config: RunConfig, manager: PluginManager, started: Any, events: Any) -> RolloutSource:
        from rlhf_host.sampling import RolloutSource

        context = ScoreContext("train", 0, started.handles, started.tokenizer)
        return RolloutSource(self.rollouts, config, manager, started.needs, started.runtime.trainer, context, events)

    def evaluate(self, config: RunConfig, manager: PluginManager, started: Any, events: Any) -> None:
        """Nothing is evaluated: nothing is sampled."""


class SavedTrajectories:
    """``DataPlugin`` of files that ``from_trajectories`` names."""

    def refusals(self, config: RunConfig, manager: PluginManager, needs: Needs) -> Sequence[str]:
        """The host refuses what has no place where nothing is sampled."""
        return ()

    def read(self, config: RunConfig, manager: PluginManager, needs: Needs, tokenizer: Any, rows: Any) -> SavedData:
        return SavedData.of(config)

    def look(self, config: RunConfig, data: Any, split: str, needs: Needs, tokenizer: Any, rows: Any) -> Sequence[str]:
        return SavedData.of(config).report if split == "train" else ()

    def length(self, config: RunConfig) -> str:
        return f"steps of {config.from_trajectories}"


SAVED_TRAJECTORIES = SavedTrajectories()
