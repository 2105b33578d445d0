"""Batches of rows that a session is given: checked, put together, and completed with what a loss needs of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf_host import Experience, Group, RoleHandle, Trajectory, UserError
from rlhf_host.internals import (
    PluginManager,
    RaggedTensor,
    Rows,
    add_advantages,
    add_extra,
    add_outputs,
    add_prompts,
    apply_masks,
    apply_rewards,
    chosen_rows,
    make_experience,
    support_metrics,
)
from rlhf_host.settings import merge_needs
from rlhf_session.rows import TrainingRow, own_trajectory

if TYPE_CHECKING:
    from rlhf_host.settings import RunConfig


class Weights(NamedTuple):
    """The weights that a batch is made for."""

    step: int
    """Optimizer steps that they have had."""
    version: int
    """Version that the engine samples from."""
    moved: bool
    """They are no longer those that the engine has."""


@dataclass(frozen=True, slots=True)
class BatchMaker:
    """Makes batches for one session."""

    config: RunConfig
    tokenizer: Any
    trainer: Any
    roles: Mapping[str, RoleHandle]
    vocabulary: int | None
    """Number of tokens that the model has; None: unknown."""
    context_length: int

    def make(
        self,
        rows: Iterable[TrainingRow | Trajectory],
        manager: PluginManager,
        reward_weights: Mapping[str, float] | None,
        now: Weights,
    ) -> Experience:
        """Returns rows as a batch, as ``TrainableSession.batch`` says.

        Args:
            manager: of the plugins that give the loss.
            now: the trainer's weights.
        """
        if isinstance(rows, TrainingRow | Trajectory | Mapping) or not hasattr(rows, "__iter__"):
            raise UserError(f"rows are a list of TrainingRow, not a {type(rows).__name__}")
        given = list(rows)
        if not given:
            raise UserError("there are no rows to train on")
        made = [self._checked(row, number, reward_weights) for number, row in enumerate(given)]
        refuse_mixed(given)
        support_metrics(made, needed=bool(self.config.rollout.truncated_by))
        known = [advantages_of(row, number) for number, row in enumerate(given)]
        rewarded = [own.reward is not None for own in given]
        names = dict.fromkeys(name for row in made for name in row.rewards)
        weights = {name: 1.0 if reward_weights is None else reward_weights.get(name, 1.0) for name in names}
        rollout, needs = self.config.rollout, merge_needs(manager)
        make = partial(
            make_experience,
            weights=weights,
            step=now.step + 1,
            max_new_tokens=rollout.max_new_tokens,
            temperature=temperature_of(given, rollout.temperature),
            version=now.version,
        )
        batch = make([Group(row.group_id, row.task, [row]) for row in made])  # which keeps their order
        if needs.samples and manager.has("make_rows"):
            if not all(rewarded):
                raise UserError(f"row {rewarded.index(False)} has no reward, and the loss chooses rows by their rewards")
            groups: dict[str, Group] = {}
            for row in made:
                groups.setdefault(row.group_id, Group(row.group_id, row.task, [])).trajectories.append(row)
            whole = make(list(groups.values()))
            apply_rewards(whole, manager)
            batch = make(chosen_rows(list(groups.values()), whole, manager))
            apply_masks(batch, manager)
            known = [None] * len(batch)
        add_prompts(batch, manager, needs, self.roles)
        add_outputs(batch, self.trainer, needs, ratio_mode(self.config, batch, now))
        has = [values is not None for values in known]
        if all(has):
            batch.advantages = _per_token(known, batch)
        elif any(has):
            raise UserError(f"row {has.index(False)} has no advantages, and others have some")
        elif manager.has("compute_advantages"):
            if not all(rewarded):
                others = ", and others have one" if any(rewarded) else ": give all rows one of the two"
                raise UserError(f"row {rewarded.index(False)} has neither advantages nor a reward{others}")
            refuse_small(given, made, needs.min_group_size)
            add_advantages(batch, manager, needs)
        add_extra(batch, manager, self.trainer, needs)
        return batch

    def _checked(self, row: TrainingRow | Trajectory, number: int, weights: Mapping[str, float] | None = None) -> Trajectory:
        """Returns the row as a trajectory. Raises ``UserError`` for one that the model cannot read."""
        if not isinstance(row, TrainingRow | Trajectory):
            raise UserError(f"row {number} is a {type(row).__name__}, not a TrainingRow")
        trajectory = own_trajectory(row, number, weights) if isinstance(row, Trajectory) else row.trajectory(number)
        trajectory.decode = trajectory.decode or self._decode
        ids = [token for segment in trajectory.segments for token in segment.token_ids]
        size = self.vocabulary
        if (odd := next((token for token in ids if not 0 <= token < (size or token + 1)), None)) is not None:
            raise UserError(f"row {number}: the model has no token {odd}; it has {size}")
        if len(ids) > (room := self.context_length):
            raise UserError(f"row {number} has {len(ids)} tokens, and the model room for {room}")
        return trajectory

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def advantages_of(row: TrainingRow | Trajectory, number: int) -> float | Sequence[float] | None:
    """Returns the advantages that a row has: one for all tokens, or one for each."""
    if isinstance(row, TrainingRow):
        return row.known_advantages(number, len(row.completion_ids))
    if row.advantages is not None:
        return row.advantages
    return row.advantage


def refuse_mixed(rows: Sequence[TrainingRow | Trajectory]) -> None:
    """Raises ``UserError`` for rows with other columns than the first."""
    own = [(number, row) for number, row in enumerate(rows) if isinstance(row, TrainingRow)]
    forms = [{name: np.ndim(values) for name, values in row.columns.items()} for _, row in own]
    for (number, _), form in zip(own, forms, strict=True):
        for name in form.keys() | forms[0].keys():
            if form.get(name) != forms[0].get(name):
                kinds = {None: "missing", 0: "one number", 1: "a list"}
                what = f"{kinds[form.get(name)]} in row {number} and {kinds[forms[0].get(name)]} in row {own[0][0]}"
                raise UserError(f"the column {name!r} is {what}: rows of a call have the same")


def refuse_small(given: Sequence[TrainingRow | Trajectory], rows: Sequence[Trajectory], least: int) -> None:
    """Raises ``UserError`` for rows by hand whose group is too small to compare them: they would have no advantage."""
    sizes = Counter(row.group_id for row in rows)
    for number, (row, own) in enumerate(zip(given, rows, strict=True)):
        if isinstance(row, TrainingRow) and sizes[own.group_id] < least:
            has = "no group" if row.group is None else f"a group of {sizes[own.group_id]}"
            raise UserError(f"row {number} has {has}, and the loss compares {least} or more: give rows of a prompt one group")


def temperature_of(rows: Sequence[TrainingRow | Trajectory], usual: float) -> float:
    """Returns the temperature of all rows; ``usual`` is that of rows which say none. Raises ``UserError`` for several, and for one
    that is no number above 0.
    """
    each = [usual if isinstance(row, Trajectory) or row.temperature is None else row.temperature for row in rows]
    for number, own in enumerate(each):
        if isinstance(own, bool) or not isinstance(own, int | float) or not math.isfinite(own) or own < 0:
            raise UserError(f"row {number}: temperature is {own!r}, and should be a number above 0")
        if own == 0:
            greedy = "set its temperature, and its logprobs to None"
            raise UserError(f"row {number} was sampled greedily (temperature 0), which is no distribution to train: {greedy}")
        if own != each[0]:
            raise UserError(f"row 0 has the temperature {each[0]:g} and row {number} {own:g}: give each its own call")
    return float(each[0])


def ratio_mode(config: RunConfig, batch: Experience, now: Weights) -> str:
    """Returns what the ratio compares with. Where the weights are no longer those that sampled, that is the sampler."""
    mode, chosen = config.old_logprobs_mode, batch.action_mask & batch.sampled_mask
    if mode != "fused" or config.train.old_logprobs != "auto" or not bool(chosen.any()):
        return mode
    return "sampler" if now.moved or bool((batch.versions[chosen] != now.version).any()) else mode


def _per_token(values: Sequence[Any], batch: Experience) -> Tensor:
    """Returns ``[B, T]`` of numbers, or of one for each token."""
    shape = Rows.of(batch.completion_mask)
    lengths = shape.lengths.tolist()
    tokens = torch.cat([torch.as_tensor(own, dtype=torch.float32).expand(n) for own, n in zip(values, lengths, strict=True)])
    if not bool(torch.isfinite(tokens).all()):
        raise UserError("advantages are not all finite")
    return RaggedTensor(tokens, shape)
