"""SDPO: the policy learns from itself where it knows a solution or why an answer failed (arXiv:2601.20802)."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_host import (
    Advantages,
    AlgoNeeds,
    Batch,
    Experience,
    Extra,
    Follow,
    LossTerm,
    Metric,
    Needs,
    Output,
    Outputs,
    RoleNeed,
    RunContext,
    RunError,
    Task,
    Trajectory,
    UserError,
    hookimpl,
)
from rlhf_host import functional as F
from rlhf_plugin_distill.options import SDPOOptions
from rlhf_plugin_distill.prompts import Hints, hinted

if TYPE_CHECKING:
    from torch import Tensor

TEACHER = "teacher"
TAUGHT = Extra("taught")


class SDPO:
    """SDPO: the teacher is the policy itself, which has seen a solution of the same task or feedback on the answer."""

    Options = SDPOOptions

    def __init__(self, options: SDPOOptions):
        self.options = options
        self._context: RunContext | None = None
        self._counts = Counter[str]()

    @hookimpl
    def needs(self) -> Needs:
        share = self.options.teacher_share
        teacher = RoleNeed(TEACHER, source="actor", follows=Follow(share) if share else None)
        signal = Output("logprobs", role=TEACHER)
        if self.options.signal == "full":
            signal = Output("distribution", role=TEACHER, top=self.options.top_k or None)
        if self.options.alpha < 1:
            return F.policy_needs(self.options, min_group_size=2, roles=(teacher,), outputs=(signal,))
        actor = RoleNeed("actor", trainable=True, source=None)
        return AlgoNeeds(data="prompts", roles=(actor, teacher), outputs=(signal,))

    @hookimpl
    def check_run(self, config: Mapping[str, Any], tokenizers: Mapping[str, Any]) -> None:
        used = {"template": True, "solution_template": self.options.solutions}
        used["feedback_template"] = self.options.feedback != "never"
        for name in (name for name, wanted in used.items() if wanted):
            text = re.sub(r"\{(prompt|solution|feedback)\}", "", getattr(self.options, name))
            tokens = tokenizers["actor"](text, add_special_tokens=False)["input_ids"]
            known = tokenizers["actor"].decode(tokens)
            if "".join(known.split()).casefold() != "".join(text.split()).casefold():
                raise UserError(
                    f"the actor's tokenizer reads the text of {name} as {known!r}: give --algo.{name.replace('_', '-')} one that"
                    " it has tokens for"
                )

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        self._context = context

    @hookimpl
    def rewrite_prompts(self, experience: Experience) -> dict[str, list[Sequence[int]]]:
        """Puts the first successful answer of the group, and the row's own feedback, into the teacher's prompt (section 3)."""
        assert self._context is not None
        room, self._counts = self._context.roles[TEACHER].context_length, Counter()
        groups = experience.group_id.tolist()
        solved: dict[int, list[int]] = {group: [] for group in groups}
        for row, (group, reward) in enumerate(zip(groups, experience.rewards.tolist(), strict=True)):
            if reward >= self.options.success and experience.trajectories[row].final:
                solved[group].append(row)
        prompts: list[Sequence[int]] = []
        for row, (own, length) in enumerate(zip(experience.trajectories, experience.lengths.tolist(), strict=True)):
            others = [other for other in solved[groups[row]] if self.options.own_solution or other != row]
            hints = self._hints(own, experience.trajectories[others[0]] if others else None)
            prompt = self._prompt(own, hints) if hints else own.prompt_ids
            if hints and len(prompt) + length > room:
                prompt, hints = own.prompt_ids, Hints()
                self._counts["too_long"] += 1
            self._counts["solution"] += bool(hints.solution)
            self._counts["feedback"] += bool(hints.feedback)
            prompts.append(prompt)
        return {TEACHER: prompts}

    def _hints(self, own: Trajectory, solution: Trajectory | None) -> Hints:
        """Returns what the teacher is told about a row."""
        shown = solution.full_text if solution is not None and self.options.solutions else ""
        if self.options.feedback == "never" or (self.options.feedback == "without_solution" and shown):
            return Hints(shown)
        told = [reward.feedback for reward in own.rewards.values() if reward is not None and reward.feedback]
        return Hints(shown, "\n".join(told))

    def _prompt(self, own: Trajectory, hints: Hints) -> list[int]:
        assert self._context is not None
        assert self._context.render is not None
        task: Task = own.task
        if task.prompt_ids is not None and tuple(task.prompt_ids) != tuple(own.prompt_ids):
            raise RunError(
                "algo sdpo writes its hints into the prompt of the task, and the agent began with another prompt: take an agent"
                " that begins with the task's own"
            )
        return self._context.render(dataclasses.replace(task, prompt=hinted(task.prompt, hints, self.options), prompt_ids=None))

    @hookimpl
    def loss_masks(self, experience: Experience) -> Tensor | None:
        """Leaves rows without a hint out: there the teacher is only another policy."""
        return taught(experience) if self.options.alpha == 1 else None

    @hookimpl
    def compute_advantages(self, experience: Experience) -> Advantages:
        """Computes GRPO's ``A_i = (R_i − mean_g R) / (std_g R + 1e-6)``, which only the rest of ``alpha`` uses."""
        mask, rows = taught(experience), len(experience)
        metrics = [Metric(f"teacher/{name}", self._counts[name] / rows) for name in ("solution", "feedback", "too_long")]
        metrics.append(Metric("teacher/taught", mask.any(-1).double()))
        if (known := experience.logprobs.get(TEACHER)) is not None:
            old = experience.old_logprobs
            measured = mask if old is not None else mask & experience.sampled_mask
            metrics.append(Metric("teacher/kl", (experience.sampler_logprobs if old is None else old) - known, measured))
        values = F.group_normalize(experience.rewards.double(), experience.group_id, experience.episode_id, eps=1e-6)
        return Advantages(F.on_actions(values, experience.action_mask), metrics=metrics)

    @hookimpl
    def prepare_batch(self, experience: Experience) -> dict[str, Tensor]:
        return {TAUGHT.name: taught(experience) & experience.loss_mask}

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[LossTerm | Metric]:
        """Computes ``α·ρ·D + (1 − α)·L``: ``D`` is the divergence, or with ``signal: sample`` the gradient of the reverse one on
        sampled tokens, ``sg(log π − log π_T)·log π``; ``ρ = min(π/π_old, ratio_max)`` without gradient; ``L`` the policy loss.
        """
        from rlhf_plugin_distill.self_distillation import self_distillation

        alpha, values = self.options.alpha, self_distillation(outputs, batch, self.options)
        mean = self.options.reduction
        yield LossTerm("self_distillation", values, mask=TAUGHT, coefficient=alpha, aggregation=mean, corrected=True)
        if self.options.signal == "full":
            yield Metric("divergence", values.detach(), batch.own[TAUGHT.name])
        if alpha < 1:
            for item in F.policy_loss(outputs, batch, self.options):
                if isinstance(item, LossTerm):
                    item.coefficient *= 1 - alpha
                yield item


def taught(experience: Experience) -> Tensor:
    """Returns ``[B, T]`` bool: the actions of rows whose teacher has a hint."""
    both = zip(experience.prompt_ids, experience.prompts[TEACHER], strict=True)
    told = experience.truncated.new_tensor([list(own) != list(theirs) for own, theirs in both])
    return experience.action_mask & told.unsqueeze(-1)
