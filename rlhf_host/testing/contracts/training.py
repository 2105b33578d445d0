"""A worker's update in miniature: a bigram model, the plugin's loss hooks, the host's own reduction."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhf_host import hookspecs
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.tensors import Experience, LossTerm, Metric, Outputs
from rlhf_host.rollouts.experience import apply_rewards
from rlhf_host.testing.contracts.batches import VOCABULARY, advantages_by, make_batch, make_groups, noise
from rlhf_host.testing.contracts.subject import Broken, Subject, expect
from rlhf_host.training.reduction import Denominators, Metrics, Reducer


class Bigram:
    """Next-token and value tables: differentiable, the same for a row whatever batch it stands in."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(3)
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=random).requires_grad_()
        self.head = torch.randn(VOCABULARY, generator=random).requires_grad_()

    def __call__(self, head: str, batch: Experience, wanted: frozenset[str] = frozenset()) -> Outputs:
        last = torch.tensor([prompt[-1] for prompt in batch.prompt_ids])
        previous = torch.cat([last.unsqueeze(-1), batch.completion_ids[:, :-1]], dim=1)
        mask = batch.completion_mask
        if head == "scalar":
            values = torch.where(mask, self.head[previous], 0.0)
            ends = (mask.sum(-1) - 1).clamp(min=0).unsqueeze(-1)
            return Outputs(values=values, scores=self.head[torch.gather(batch.completion_ids, 1, ends)].squeeze(-1))
        logits = self.table[previous]
        logs = torch.log_softmax(logits, -1)
        logprobs = torch.gather(logs, -1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)
        return Outputs(
            logprobs=torch.where(mask, logprobs, 0.0),
            entropy=torch.where(mask, -(logs.exp() * logs).sum(-1), 0.0),
            logits=logits if "logits" in wanted else None,
        )

    @property
    def parameters(self) -> list[Tensor]:
        return [self.table, self.head]


@dataclass(slots=True)
class Updated:
    """One optimizer batch: its loss, its gradients, what was returned and measured."""

    loss: Tensor
    gradients: list[Tensor]
    terms: list[LossTerm] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.loss)) and all(bool(torch.isfinite(part).all()) for part in self.gradients)


def trainable(subject: Subject) -> dict[str, str]:
    """Role → head of the roles that ``compute_loss`` is called for; the actor where the plugin declares none."""
    return {role.name: role.head for role in subject.needs.roles if role.trainable} or {"actor": "lm"}


def online(subject: Subject) -> bool:
    """Whether its losses are made from rollouts, as these batches are."""
    return subject.needs.data in (None, "prompts")


def training_batch(subject: Subject, manager: PluginManager, *, turns: int = 3, sizes: Sequence[int] = (4, 2, 3)) -> Experience:
    """A batch as workers get it: rewards shaped, masks applied, advantages computed by ``manager``'s plugin (or made up)."""
    batch = make_batch(subject, make_groups(sizes, turns=turns, seed=1))
    if "compute_advantages" in subject.hooks:
        advantages_by(manager, batch)
    else:
        apply_rewards(batch, manager)
    if batch.advantages is None:
        batch.advantages = torch.where(batch.action_mask, noise(batch, 70), 0.0)
        batch.returns = torch.where(batch.action_mask, noise(batch, 71), 0.0)
    with torch.no_grad():
        now = Bigram()("lm", batch).logprobs
    assert now is not None
    batch.old_logprobs = torch.where(batch.action_mask, now + 0.1 * noise(batch, 72), 0.0)
    batch.sampler_logprobs = torch.where(batch.action_mask, now + 0.1 * noise(batch, 73), 0.0)
    return batch


def update(
    subject: Subject,
    manager: PluginManager,
    role: str,
    batch: Experience,
    split: Sequence[Sequence[int]] | None = None,
    *,
    spoiled: bool = False,
) -> Updated:
    """The role's loss and gradients over the optimizer batch, in the given micro-batches, as the host's worker computes them.

    Args:
        split: rows of each micro-batch; default: all in one.
        spoiled: outputs are NaN at padding and observations.
    """
    model, head = Bigram(), trainable(subject)[role]
    parts = [list(rows) for rows in split or [range(len(batch))]]
    wanted = subject.needs.outputs
    _statistics(manager, role, head, batch, parts, model)
    reducer, found = Reducer(Denominators.of(batch)), Metrics()
    total, terms = torch.zeros(()), []
    for rows in parts:
        part = batch.select(rows)
        part.trajectories = []
        outputs = model(head, part, wanted)
        if spoiled:
            outputs = _spoiled(outputs, part)
        corrections = corrections_of(manager, outputs, part)
        for item in items_of(manager, role, outputs, part):
            if isinstance(item, Metric):
                found.add([item])
                continue
            terms.append(item)
            try:
                total = total + reducer.reduce(item, rows, corrections)
            except ValueError as error:
                raise Broken(str(error)) from error
    gradients = [torch.zeros_like(parameter) for parameter in model.parameters]
    if total.requires_grad:
        made = torch.autograd.grad(total, model.parameters, allow_unused=True)
        gradients = [zero if part is None else part for part, zero in zip(made, gradients, strict=True)]
    return Updated(total.detach(), gradients, terms, found.result())


def items_of(manager: PluginManager, role: str, outputs: Outputs, batch: Experience) -> list[LossTerm | Metric]:
    """What ``compute_loss`` gives, as a list of the right types."""
    found = [list(items) for _, items in manager.each("compute_loss", role=role, outputs=outputs, batch=batch)]
    items = [item for part in found for item in part]
    for item in items:
        known = isinstance(item, LossTerm | Metric)
        expect(known, f"compute_loss returned a {type(item).__name__}; it gives LossTerm and Metric")
    return items


def corrections_of(manager: PluginManager, outputs: Outputs, batch: Experience) -> Tensor | None:
    """``importance_weights`` of the micro-batch, ``None`` where the plugin has no such hook."""
    if outputs.logprobs is None or not manager.has("importance_weights"):
        return None
    logprobs = outputs.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    return weights_of(manager, logprobs, batch, outputs.logprobs.detach())


def weights_of(manager: PluginManager, logprobs: Tensor, batch: Experience, current: Tensor | None = None) -> Any:
    """The hook ``importance_weights`` itself, with the arguments that it has."""
    given: dict[str, Any] = {
        "logprobs": logprobs,
        "sampler_logprobs": batch.sampler_logprobs,
        "advantages": batch.advantages,
        "mask": batch.action_mask,
        "current_logprobs": logprobs if current is None else current,
    }
    has = inspect.signature(hookspecs.importance_weights).parameters
    return manager.one("importance_weights", **{name: value for name, value in given.items() if name in has})


def _statistics(
    manager: PluginManager, role: str, head: str, batch: Experience, parts: Sequence[list[int]], model: Bigram
) -> None:
    found = Metrics()
    with torch.no_grad():
        for rows in parts:
            part = batch.select(rows)
            part.trajectories = []
            for _, items in manager.each("batch_statistics", role=role, outputs=model(head, part), batch=part):
                found.add(items)
    batch.stats = {**batch.stats, **found.result()}


def _spoiled(outputs: Outputs, batch: Experience) -> Outputs:
    # Added, so that a gradient at a masked position reaches the model, as it would from a real forward pass.
    garbage = torch.where(batch.action_mask, 0.0, float("nan"))

    def spoil(value: Tensor | None) -> Tensor | None:
        return None if value is None else value + garbage

    return Outputs(spoil(outputs.logprobs), spoil(outputs.entropy), spoil(outputs.values), outputs.scores, outputs.logits)
