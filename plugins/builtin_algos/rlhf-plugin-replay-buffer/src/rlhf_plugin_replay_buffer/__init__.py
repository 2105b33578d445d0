"""A replay buffer: groups of earlier steps train where those of a step have no signal."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from pydantic import Field, PositiveInt, model_validator

from rlhf_host import (
    Batch,
    Experience,
    Extra,
    LossTerm,
    Metric,
    Needs,
    Outputs,
    RunContext,
    Segment,
    Task,
    Trajectory,
    UserError,
    hookimpl,
)
from rlhf_host import functional as F

__all__ = ["ReplayBuffer"]

RIGHT = ("rloo", "grpo", "dr_grpo", "opo", "maxrl", "gigpo")
"""Algorithms whose advantages come from the group alone, so that they stay right, and are 0 where a group has no signal."""
WRONG = {
    "ppo": "its advantages are those of a critic that has moved since",
    "reinforce_pp": "it compares answers of the whole batch, so no group is without a signal",
    "reinforce_pp_baseline": "it whitens advantages over the batch that they were sampled in",
    "gdpo": "it normalises advantages over the batch that they were sampled in",
    "gmpo": "it has a loss of its own",
    "luspo": "it has a loss of its own",
    "vespo": "it has a loss of its own",
    "on_policy_distill": "its signal is a teacher's word on answers of now",
    "sdpo": "its signal is a teacher's word on answers of now",
}
OLD, ADVANTAGE = "replay_logprob", "replay_advantage"
"""Columns of tokens: log μ of the sampler, and the advantage at the time."""


class Options(F.PolicyLossOptions):
    capacity: PositiveInt = Field(64, description="groups that are kept; the one with the lowest score leaves first")
    max_age: PositiveInt = Field(10, description="steps after which a group leaves")
    trust: bool = Field(
        False,
        description="take an algorithm that is not known here: its advantages come from the group alone, its loss is algo.loss",
    )

    @model_validator(mode="after")
    def _has_a_ratio(self) -> Options:
        if self.loss == "pg":
            raise ValueError("loss pg has no ratio, so nothing corrects for the age of answers: take clip")
        if self.loss == "gspo":
            raise ValueError("loss gspo clips what moved by 4e-4, which is all that is a step old: take clip")
        if self.entropy_coef:
            raise ValueError("entropy_coef is the algorithm's: leave it out")
        if self.reduction.name == "group-mean-token-mean":
            raise ValueError("aggregation group-mean-token-mean needs whole groups in an update: take another")
        return self


class ReplayBuffer:
    """Keeps groups with large advantages. Where a group of a step has none, one of them trains in its place, with the ratio to the
    policy that sampled it, as TRL's GRPO with a replay buffer."""

    Options = Options

    def __init__(self, options: Options):
        self.options = options
        self.groups: list[dict[str, Any]] = []
        self.chosen: list[dict[str, Any]] = []
        """Those that train in this step."""
        self.batch_size, self.seed = 0, 0

    @hookimpl
    def needs(self) -> Needs:
        return Needs(data="prompts", min_group_size=2)

    @hookimpl
    def check_run(self, config: Mapping[str, Any]) -> None:
        algo = config["algo"]
        name, self.batch_size = algo["name"].rpartition(":")[2], config["train"]["batch_size"]
        if name not in RIGHT and not self.options.trust:
            why = WRONG.get(name, "it is not known whether its advantages stay right after their step")
            rest = "" if name in WRONG else "; if they do, give --replay_buffer.trust true"
            raise UserError(
                f"replay_buffer trains on advantages of earlier steps, and not with {name}: {why};"
                f" it is for {', '.join(RIGHT)}{rest}"
            )
        shared = {field: algo[field] for field in F.PolicyLossOptions.model_fields if field in algo and field != "entropy_coef"}
        theirs = F.PolicyLossOptions.model_validate(shared)
        if name == "dr_grpo":
            length = algo.get("max_length") or config["rollout"]["max_new_tokens"]
            theirs = theirs.model_copy(update={"aggregation": f"sequence-mean-token-sum-over({length})"})
        for field in F.PolicyLossOptions.model_fields:
            mine, other = (getattr(each, field) for each in (self.options, theirs))
            if field == "aggregation":
                mine, other = str(self.options.reduction), str(theirs.reduction)
            if mine != other and field != "entropy_coef":
                flag = f"--replay_buffer.{field.replace('_', '-')} {other}"
                raise UserError(
                    f"{field} of {name} is {other}, and of replay_buffer {mine}: give {flag}, so that both losses agree"
                )

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        self.seed = context.seed

    @hookimpl
    def prepare_batch(self, experience: Experience) -> dict[str, float]:
        """Chooses the groups that train in place of those without a signal, then adds those of this step that have one."""
        import numpy as np

        if experience.images is not None:
            raise UserError("replay_buffer keeps no pictures, and the rows of this run have some: leave it out")
        step = experience.step
        self.groups = [group for group in self.groups if step - group["step"] <= self.options.max_age]
        fresh, unknown = self._with_signal(experience)
        count = int(experience.group_id.max()) + 1
        wanted = min(max(self.batch_size, count) - len(fresh) - unknown, len(self.groups))
        self.chosen = []
        if wanted > 0:
            scores = np.array([group["score"] for group in self.groups])
            keys = np.random.default_rng([self.seed, step]).exponential(size=len(scores)) / scores
            self.chosen = [self.groups[place] for place in np.argsort(keys, kind="stable")[:wanted]]
        both = sorted(self.groups + fresh, key=lambda group: (group["score"], group["step"]), reverse=True)
        self.groups = both[: self.options.capacity]
        numbers = {"groups": float(len(self.chosen)), "size": float(len(self.groups)), "share": len(self.chosen) / count}
        if unknown:
            numbers["unknown"] = float(unknown)
        if self.chosen:
            numbers["age"] = statistics.fmean(step - group["step"] for group in self.chosen)
        return numbers

    def _with_signal(self, experience: Experience) -> tuple[list[dict[str, Any]], int]:
        """Returns the groups with an advantage that is not 0, and how many more there are of which the sampler's
        log-probabilities are not known. A group's score is ``std(R)·Σ_i |A_i|``, as TRL's.
        """
        from rlhf_host.internals import Rows

        assert experience.advantages is not None
        shape, rows = Rows.of(experience.completion_mask), []
        tensors = (experience.completion_ids, experience.loss_mask, experience.sampler_logprobs, experience.advantages)
        for ids, trained, logprobs, advantages in zip(*(shape.each(tensor) for tensor in tensors), strict=True):
            rows.append((ids, trained, logprobs, advantages))
        members: dict[int, list[int]] = {}
        for row, group in enumerate(experience.group_id.tolist()):
            members.setdefault(group, []).append(row)
        groups, unknown = [], 0
        for own in members.values():
            sizes = [float(rows[row][3][rows[row][1]].abs().mean()) if rows[row][1].any() else 0.0 for row in own]
            score = float(experience.rewards[own].double().std(correction=0)) * sum(sizes)
            if not score > 0:
                continue
            if not all(rows[row][2][rows[row][1]].isfinite().all() for row in own):
                unknown += 1
                continue
            kept = [
                {
                    "prompt": [*experience.prompt_ids[row]],
                    "truncated": bool(experience.truncated[row]),
                    **{
                        name: tensor.clone()
                        for name, tensor in zip(("ids", "trained", "logprobs", "advantages"), rows[row], strict=True)
                    },
                }
                for row in own
                if rows[row][1].any()
            ]
            groups.append({"step": experience.step, "score": score, "index": int(experience.task_index[own[0]]), "rows": kept})
        return groups, unknown

    @hookimpl
    def auxiliary_rows(self, step: int) -> list[Trajectory]:
        return [_row(row, group) for group in self.chosen for row in group["rows"]]

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[LossTerm | Metric]:
        """Computes the policy loss of the replayed rows: ``ρ = π/μ`` with the log-probabilities and advantages of their step. It is
        weighted by their groups per group of the batch, so a replayed group counts as one of the batch.
        """
        import torch

        mask = batch.own["beside"]
        assert outputs.logprobs is not None
        if OLD in batch.token_columns:
            logprobs = torch.where(mask, outputs.logprobs, 0.0)
            old, advantages = (torch.where(mask, batch.token_columns[name], 0.0) for name in (OLD, ADVANTAGE))
            values, measured = F.policy_losses[self.options.loss](logprobs, old, advantages, mask, self.options)
            share = batch.own["share"]
            yield LossTerm("replay", share * values, mask=Extra("beside"), aggregation=self.options.reduction)
            for metric in (*measured, Metric("drift", (old - logprobs).detach(), mask)):
                yield dataclasses.replace(metric, name=f"replay/{metric.name}")
        for name in ("groups", "size", "age", "unknown"):
            if name in batch.own:
                yield Metric(f"replay/{name}", batch.own[name])

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        return {"groups": list(self.groups)}

    @hookimpl
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.groups = [dict(group) for group in state["groups"]]


def _row(row: Mapping[str, Any], group: Mapping[str, Any]) -> Trajectory:
    """Returns a stored row. Tokens that were not in the loss are observations, so that they are not in this one either."""
    segments, begin = [Segment("prompt", row["prompt"])], 0
    ids, logprobs, advantages = (row[name].tolist() for name in ("ids", "logprobs", "advantages"))
    for trained, run in groupby(row["trained"].tolist()):
        end = begin + len(list(run))
        columns = {OLD: logprobs[begin:end], ADVANTAGE: advantages[begin:end]} if trained else {}
        segments.append(Segment("action" if trained else "observation", ids[begin:end], columns=columns))
        begin = end
    reason = "length" if row["truncated"] else "stop"
    return Trajectory("", "", Task("", index=group["index"]), segments, finish_reason=reason)
