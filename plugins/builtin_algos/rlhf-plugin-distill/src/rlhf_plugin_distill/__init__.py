"""Distillation: a student learns to predict what teachers predict, on a data set or on its own answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_host import (
    Advantages,
    AlgoNeeds,
    Batch,
    Experience,
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
from rlhf_plugin_distill.options import OnPolicyDistillOptions, Options, TeacherOptions
from rlhf_plugin_distill.sdpo import SDPO

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_plugin_distill.teachers import OwnTokens

__all__ = ["SDPO", "Distill", "OnPolicyDistill"]

log = logging.getLogger(__name__)

FEW = 0.5
"""Share of pieces that are one token of both, below which a run is warned."""


class Taught:
    """The part of both algorithms that serves their teachers: roles, the rows that each teaches, and rows in its own tokens."""

    options: Any

    def __init__(self, options: TeacherOptions):
        self.options = options
        self._context: RunContext | None = None
        self._readers: dict[str, OwnTokens] = {}
        self._spans: tuple[Experience, dict[str, Tensor]] | None = None
        self._warned: set[str] = set()

    def teachers(self) -> tuple[RoleNeed, ...]:
        return tuple(RoleNeed(name, source=None, own_tokens=self.options.own_tokens) for name in self.options.teachers)

    def texts(self) -> bool:
        """Returns True if rows of a data set must keep what they were read from."""
        return bool(self.options.own_tokens or self.options.teacher_key is not None)

    def distributions(self) -> tuple[Output, ...]:
        names, top = self.options.teachers, self.options.top_k or None
        outputs = [Output("distribution", role=name, top=top) for name in names]
        if self.options.own_tokens and top is not None:
            outputs += [Output("logits"), *(Output("logprobs", role=name) for name in names)]
        return tuple(outputs)

    @hookimpl
    def check_run(self, config: Mapping[str, Any], tokenizers: Mapping[str, Any]) -> None:
        """Refuses tokenizers whose tokens are not pieces of text, and a teacher that has no token of the actor's."""
        if not self.options.own_tokens:
            return
        from rlhf_plugin_distill.teachers import Tokens, shared_tokens

        student = Tokens(config, "actor", tokenizers["actor"])
        for name in self.options.teachers:
            if not shared_tokens(Tokens(config, name, tokenizers[name]), student) and self.options.across == "gold":
                raise UserError(f"the teacher {name!r} has no token that the actor has: set --algo.across uld")

    @hookimpl
    def check_labels(self, tasks: Sequence[Task]) -> dict[int, str]:
        """Finds rows whose column names no teacher."""
        if self.options.teacher_key is None:
            return {}
        found = {place: self._unknown(task) for place, task in enumerate(tasks)}
        return {place: problem for place, problem in found.items() if problem}

    def _unknown(self, task: Task) -> str:
        key, names = self.options.teacher_key, self.options.teachers
        if key not in task.metadata:
            return f"it has no column {key!r} with the name of its teacher ({', '.join(names)})"
        value = task.metadata[key]
        return "" if value in names else f"its {key!r} is {value!r}, and the teachers are {', '.join(names)}"

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        self._context = context

    @hookimpl
    def rewrite_rows(self, experience: Experience) -> dict[str, list[Trajectory]]:
        """Gives teachers with their own tokens the text of each row that they teach."""
        if not self.options.own_tokens:
            return {}
        read = {name: reader.read(experience, self._rows_of(name, experience)) for name, reader in self._own().items()}
        self._spans = experience, {name: table for name, (_, table) in read.items()}
        if getattr(self.options, "signal", "full") == "full" and getattr(self.options, "alpha", 1.0) == 1.0:
            for name, table in self._spans[1].items():
                self._warn_of_other_tokens(name, table)
        return {name: rows for name, (rows, _) in read.items()}

    def _warn_of_other_tokens(self, name: str, table: Tensor) -> None:
        """Says once that most pieces of text are other tokens for the teacher than for the actor."""
        from rlhf_plugin_distill.other_vocabulary import one_of_both

        if name in self._warned:
            return
        pieces = int((table[..., 0] > 0).sum())
        share = float(one_of_both(table).sum()) / max(pieces, 1)
        if pieces and share < FEW:
            self._warned.add(name)
            log.warning(
                "%.0f %% of the pieces of text are one token of the teacher %r and of the actor. In all others the loss compares"
                " probabilities by their size, not by their text, and may teach the wrong ones: see NAME/same_tokens. Take"
                " distill with the likelihood of the texts (--algo.alpha 0.6), or on_policy_distill with --algo.signal sample",
                100 * share,
                name,
            )

    def _own(self) -> dict[str, OwnTokens]:
        """Returns the readers of the teachers' tokens."""
        from rlhf_plugin_distill.teachers import OwnTokens, Tokens

        context = self._context
        assert context is not None
        if not self._readers:
            student = Tokens(context.config, "actor", context.tokenizer)
            for name in self.options.teachers:
                self._readers[name] = OwnTokens(context.roles[name], name, context.config, student)
        return self._readers

    def _rows_of(self, name: str, experience: Experience) -> list[bool]:
        """Returns whether the teacher teaches each row. Raises ``RunError`` for a row that names no teacher."""
        if self.options.teacher_key is None:
            return [True] * len(experience)
        for row in experience.trajectories:
            if problem := self._unknown(row.task):
                raise RunError(f"{row.task.source}, task {row.task.index + 1}: {problem}")
        return [row.task.metadata[self.options.teacher_key] == name for row in experience.trajectories]

    def spans(self, name: str, experience: Experience) -> Tensor:
        """Returns the pieces of text that ``rewrite_rows`` found, ``[B, T, 3]``, of which all tokens are in the loss."""
        import torch

        assert self._spans is not None
        assert self._spans[0].trajectories is experience.trajectories
        table = self._spans[1][name]
        inside = torch.nn.functional.pad(experience.loss_mask.long().cumsum(-1), (1, 0))
        begin = torch.arange(table.shape[1])
        end = (begin + table[..., 0]).clamp(max=table.shape[1])
        whole = inside.gather(-1, end) - inside[:, :-1] == table[..., 0]
        return torch.where(whole.unsqueeze(-1), table, 0)

    @hookimpl
    def prepare_batch(self, experience: Experience) -> dict[str, Tensor | float]:
        """Gives workers, for each teacher, what it teaches, and the pieces and tokens that both have."""
        import torch

        if not self.options.several:
            return {}
        found: dict[str, Tensor | float] = {}
        taught = torch.zeros(experience.loss_mask.shape, dtype=torch.bool)
        for name in self.options.teachers:
            rows = torch.tensor(self._rows_of(name, experience)).unsqueeze(-1)
            places = read = experience.loss_mask & rows
            if self.options.own_tokens:
                spans, reader = self.spans(name, experience), self._own()[name]
                pairs = reader.shared if self.options.across == "gold" else []
                places = spans[..., 0] > 0
                # Its first sizes are 1, so that it is of no row and has no place.
                found[f"{name}/shared"] = torch.tensor(pairs, dtype=torch.int64).reshape(1, 1, -1, 2)
                found |= {f"{name}/spans": spans, f"{name}/vocabulary": float(len(reader.teacher.bytes)), f"{name}/read": read}
            found[f"{name}/taught"] = places
            taught = taught | places
        return {**found, "taught": taught}


class Distill(Taught):
    """Distillation on a data set: at each trained token the student's distribution is pulled towards the teachers'."""

    Options = Options

    @hookimpl
    def needs(self) -> Needs:
        actor = RoleNeed("actor", trainable=True, source=None, lr=2e-5)
        roles = (actor, *self.teachers())
        outputs = self.distributions()
        return AlgoNeeds(data="prompt_completion", roles=roles, outputs=outputs, rewards=False, texts=self.texts())

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[LossTerm | Metric]:
        """Computes ``(1 − α)·(−log π) + α·Σ_k w_k·D_k``, a mean over trained tokens."""
        import torch

        from rlhf_plugin_distill.losses import distillation

        if outputs.logprobs is None:
            return
        alpha, mask = self.options.alpha, batch.loss_mask
        yield from distillation(outputs, batch, self.options, alpha, self.options.temperature)
        nll = torch.where(mask, -outputs.logprobs, 0.0)
        if alpha < 1:
            yield LossTerm("cross_entropy", nll, coefficient=1 - alpha)
        yield Metric("nll", nll.detach(), mask)


class OnPolicyDistill(Taught):
    """On-policy distillation: on the student's own answers, its distribution is pulled towards the teachers'."""

    Options = OnPolicyDistillOptions

    @hookimpl
    def needs(self) -> Needs:
        teachers = self.teachers()
        if self.options.signal == "sample":
            outputs = tuple(Output("logprobs", role=name) for name in self.options.teachers)
            return replace(F.policy_needs(self.options, roles=teachers, outputs=outputs), rewards=False)
        actor = RoleNeed("actor", trainable=True, source=None)
        return AlgoNeeds(data="prompts", roles=(actor, *teachers), outputs=self.distributions(), rewards=False, weights=None)

    @hookimpl
    def compute_advantages(self, experience: Experience) -> Advantages:
        """Computes, for ``sample``, ``A_t = Σ_k w_k·(log π_k − log π_old)``, whose mean over samples is ``−Σ_k w_k·KL(π_old ‖
        π_k)``, per token and not summed to the right (arXiv:2306.13649; Lu et al., "On-Policy Distillation", 2025). Tokens of a
        piece of text that a teacher has in other tokens share the piece's difference. If ``π_old`` is the policy of the same
        pass, the sampler's log-probabilities are used instead, and tokens without them get 0.
        """
        import torch

        mask = experience.action_mask
        advantages, metrics = torch.zeros(mask.shape), []
        if self.options.signal == "full":
            return Advantages(advantages)
        old = experience.old_logprobs
        if old is None:
            mask, old = experience.sampled_mask, experience.sampler_logprobs
        for name, weight in self.options.teachers.items():
            rows = mask & torch.tensor(self._rows_of(name, experience)).unsqueeze(-1)
            if self.options.own_tokens:
                from rlhf_plugin_distill.other_vocabulary import span_gaps

                theirs = experience.rows[name].logprobs[name]
                gap, measured, rows = span_gaps(self.spans(name, experience), theirs, torch.where(mask, old, 0.0), rows)
            else:
                gap = measured = torch.where(rows, experience.logprobs[name] - old, 0.0)
            advantages = advantages + weight * gap
            metrics.append(Metric(f"{name}/kl", -measured, rows))
        return Advantages(advantages, metrics=metrics)

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[LossTerm | Metric]:
        from rlhf_plugin_distill.losses import distillation

        if self.options.signal == "sample":
            yield from F.policy_loss(outputs, batch, self.options)
        else:
            yield from distillation(outputs, batch, self.options)
