"""Replay: scores saved trajectories and computes their advantages again, with other plugins, and shows what that changes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_host import Experience, Group, Needs, RoleNeed, Session, Trajectory, UserError
from rlhf_host.internals import PluginManager
from rlhf_host.models import load_tokenizer
from rlhf_host.sampling import SavedStep, decoder, session
from rlhf_host.settings import RunConfig, merge_needs
from rlhf_samples.saved_steps import check_vocabulary, judged_groups, reward_weights


@dataclass(slots=True)
class Change:
    """One trajectory before and after."""

    step: int
    split: str
    old: Trajectory
    new: Trajectory
    reward: float | None
    """Reward after ``transform_rewards``; None if it is unjudged."""
    dropped: str | None = None
    """Reason for which a filter refuses its group."""
    masked: bool = False
    """True if no token of it is in the loss."""

    @property
    def text(self) -> str:
        """The answer; empty if neither the file nor a tokenizer has it."""
        try:
            return self.new.text
        except UserError:
            return ""

    def row(self) -> dict[str, Any]:
        """Returns JSON values; ``advantage`` is the mean over the tokens in the loss."""
        old, new = self.old, self.new
        return {
            "step": self.step,
            "split": self.split,
            "group_id": old.group_id,
            "sample": old.sample,
            "source": old.task.source,
            "task": old.task.index,
            "text": self.text,
            "label": old.task.ground_truth,
            "reward": {"old": old.reward, "new": self.reward},
            "score": {"old": old.score, "new": new.score},
            "advantage": {"old": old.advantage, "new": new.advantage},
            "unjudged": new.unjudged_reason,
            "dropped": self.dropped,
            "masked": self.masked,
        }


@dataclass(slots=True)
class Replay:
    """Results of a replay."""

    changes: list[Change]
    steps: list[SavedStep]
    """Trajectories with their new scores, without groups that a filter refused."""
    recomputed: bool
    """True if the file had no advantages: the old ones are then computed with the given algorithm from the saved rewards."""

    def summary(self) -> dict[str, Any]:
        old, new = [c.old.reward for c in self.changes], [c.reward for c in self.changes]
        before, after = [c.old.advantage for c in self.changes], [c.new.advantage for c in self.changes]
        pairs = [(a, b) for a, b in zip(before, after, strict=True) if a is not None and b is not None]
        old_sizes, new_sizes = ([abs(a) for a in advantages if a is not None] for advantages in (before, after))
        return {
            "trajectories": len(self.changes),
            "rewards_changed": sum(map(_differ, old, new)),
            "reward_mean": {"old": _mean(old), "new": _mean(new)},
            "unjudged": {"old": old.count(None), "new": sum(c.new.reward is None for c in self.changes)},
            "dropped": sum(c.dropped is not None for c in self.changes),
            "masked": sum(c.masked for c in self.changes),
            "advantages_changed": sum(_differ(a, b) for a, b in pairs),
            "advantages_flipped": sum(a * b < 0 for a, b in pairs),
            "advantage_size_mean": {"old": _mean(old_sizes), "new": _mean(new_sizes)},
            "old_advantages": "recomputed from the saved rewards" if self.recomputed else "as saved",
        }


def _differ(old: float | None, new: float | None) -> bool:
    if old is None or new is None:
        return old is not new
    return not math.isclose(old, new, rel_tol=1e-5, abs_tol=1e-7)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def replay_steps(config: RunConfig, manager: PluginManager, steps: Sequence[SavedStep]) -> Replay:
    """Scores, filters and computes advantages as a run with these plugins would. Everything that is not chosen stays as saved.

    A model is loaded only if a plugin asks a role for something; trained roles, such as a critic, are used as they are.

    Raises:
        UserError: a role, or a text that is not in the file, needs a model that is not given.
        RunError: a plugin returns something unusable.
    """
    needs, actor = merge_needs(manager), config.roles["actor"]
    roles = _roles(needs)
    tokenizer = load_tokenizer(actor) if actor.model else None
    if roles and tokenizer is None:
        names = ", ".join(sorted({role.name for role in roles if role.name != "actor"} or {"actor"}))
        raise UserError(f"the chosen plugins ask the role {names}, beside the actor's tokenizer: give --actor.model PATH")
    if roles:
        for step in steps:
            step.require_tokens("the chosen plugins ask models about tokens, and the file has only texts")
        check_vocabulary(steps, actor)
    with session(config, manager, needs=dataclasses.replace(needs, roles=roles), tokenizer=tokenizer) as running:
        return _Replayer(manager, running).run(steps)


def _noted(decode: Callable[[Sequence[int]], str] | None, missing: list[UserError]) -> Callable[[Sequence[int]], str] | None:
    """Returns the decoder unchanged, but records texts that are not in the file."""
    if decode is None:
        return None

    def noted(token_ids: Sequence[int]) -> str:
        try:
            return decode(token_ids)
        except UserError as error:
            missing.append(error)
            raise

    return noted


def _roles(needs: Needs) -> tuple[RoleNeed, ...]:
    """Returns the roles needed to score and compute advantages, all frozen; with any other role comes the actor."""
    asked = {output.role for output in needs.outputs if output.what != "distribution"}
    wanted = [role for role in needs.roles if role.name in asked or not role.trainable]
    roles = [dataclasses.replace(role, trainable=False, follows=None) for role in wanted]
    if roles and all(role.name != "actor" for role in roles):
        roles.insert(0, RoleNeed("actor", source=None))
    return tuple(roles)


@dataclass(slots=True)
class _Replayer:
    manager: PluginManager
    session: Session

    def run(self, steps: Sequence[SavedStep]) -> Replay:
        changes: list[Change] = []
        scored: list[SavedStep] = []
        recomputed = False
        for step in steps:
            fresh = self._fresh(step)
            weights, judged = self._scored(step, fresh)
            groups, dropped = self._filtered(step, fresh)
            of_step = [
                Change(step.step, step.split, old, new, new.reward, dropped.get(old.group_id))
                for old, new in zip(step.rows, fresh, strict=True)
            ]
            if self.manager.has("compute_advantages") and all(row.advantage is None for row in step.rows):
                recomputed = True
                if saved := judged_groups(step):
                    self.session.experience(step, saved, reward_weights(step, {}))
            if groups:
                experience = self.session.experience(step, groups, weights)
                _note(experience, {id(change.new): change for change in of_step})
            changes += of_step
            rows = [change.new for change in of_step if change.dropped is None]
            scored.append(dataclasses.replace(step, rows=rows, weights=weights if judged else step.weights))
        return Replay(changes, scored, recomputed)

    def _fresh(self, step: SavedStep) -> list[Trajectory]:
        """Returns copies whose texts are those of the tokenizer, if there is one."""
        rows = [dataclasses.replace(row, advantage=None, metrics=dict(row.metrics)) for row in step.rows]
        for row in rows if self.session.tokenizer is not None and step.tokens else ():
            row.decode = decoder(self.session.tokenizer)
        return rows

    def _scored(self, step: SavedStep, rows: list[Trajectory]) -> tuple[dict[str, float], bool]:
        """Scores rows in place; returns the weight of each reward, and True if a chosen plugin scored them."""
        missing: list[UserError] = []
        for row in rows:
            row.decode = _noted(row.decode, missing)
        weights = self.session.score_again(dataclasses.replace(step, rows=rows))
        if missing:
            step.require_tokens("the chosen rewards read more than the answer, and the file has only that")
            raise missing[0]  # else it would be the reward's failure, and leave its rows unjudged
        return weights or reward_weights(step, {}), bool(weights)

    def _filtered(self, step: SavedStep, rows: Sequence[Trajectory]) -> tuple[list[Group], dict[str, str]]:
        """Returns the judged rows by group, and the reasons why training would not have kept others."""
        remaining: list[Group] = []
        dropped: dict[str, str] = {}
        for group in judged_groups(dataclasses.replace(step, rows=list(rows))):
            reason = self.session.drop_reason(group) if step.split == "train" else None
            if reason is None:
                remaining.append(group)
            else:
                dropped[group.group_id] = reason
        return remaining, dropped


def _note(experience: Experience, changes: Mapping[int, Change]) -> None:
    """Notes the rewards of a batch, and which rows are not in the loss, in the changes of its rows."""
    rewards, in_loss = experience.rewards.tolist(), experience.loss_mask.any(-1).tolist()
    for row, reward, inside in zip(experience.trajectories, rewards, in_loss, strict=True):
        change = changes[id(row)]
        # float32 only where a transform has changed it
        unchanged = row.reward is not None and math.isclose(reward, row.reward, rel_tol=1e-6)
        change.reward = row.reward if unchanged else reward
        change.masked = not inside
