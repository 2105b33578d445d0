"""A worker's update in miniature: a bigram model, the plugin's loss hooks, the host's own reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhf_host.errors import RunError
from rlhf_host.plugins.manager import HookFailed, PluginManager
from rlhf_host.records.needs import Output
from rlhf_host.records.tensors import Batch, Distribution, Experience, LossTerm, Metric, Outputs
from rlhf_host.rollouts.experience import apply_rewards
from rlhf_host.testing.contracts.batches import VOCABULARY, advantages_by, make_batch, make_groups, noise
from rlhf_host.testing.contracts.subject import Broken, Subject
from rlhf_host.training.corrections import correction_weights
from rlhf_host.training.reduction import Denominators, Metrics, Reducer
from rlhf_host.training.update import ask


class Bigram:
    """Next-token and value tables: differentiable, the same for a row whatever batch it stands in."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(3)
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=random).requires_grad_()
        self.head = torch.randn(VOCABULARY, generator=random).requires_grad_()

    def __call__(self, head: str, batch: Batch, wanted: Sequence[Output] = ()) -> Outputs:
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
            logits=logits if Output("logits") in wanted else None,
            others={one.role: self._beside(logs, previous, mask, one.top) for one in wanted if one.what == "distribution"},
        )

    def _beside(self, logs: Tensor, previous: Tensor, mask: Tensor, top: int | None) -> Distribution:
        """Another role's distribution, of the same table turned round."""
        theirs, ids = torch.log_softmax(self.table.detach().flip(0)[previous], -1), None
        if top is not None:
            theirs, ids = theirs.topk(min(top, VOCABULARY))
            logs = torch.gather(logs, -1, ids)
        there = mask.unsqueeze(-1)
        return Distribution(torch.where(there, theirs, 0.0), torch.where(there, logs, 0.0), ids)

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
    for key, given in manager.each("prepare_batch", experience=batch):
        batch.extra[manager.by_key[key].alias] = given
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
        part = batch.batch().select(rows)
        outputs = model(head, part, wanted)
        if spoiled:
            outputs = _spoiled(outputs, part)
        corrections = correction_weights(manager, outputs, part, gates_only=False)
        for item in items_of(manager, role, outputs, part):
            if isinstance(item, Metric):
                found.add([item])
                continue
            terms.append(item)
            try:
                total = total + reducer.reduce(item, rows, corrections, subject.info.name)
            except ValueError as error:
                raise Broken(str(error)) from error
    gradients = [torch.zeros_like(parameter) for parameter in model.parameters]
    if total.requires_grad:
        made = torch.autograd.grad(total, model.parameters, allow_unused=True)
        gradients = [zero if part is None else part for part, zero in zip(made, gradients, strict=True)]
    return Updated(total.detach(), gradients, terms, found.result())


def items_of(manager: PluginManager, role: str, outputs: Outputs, batch: Batch) -> list[LossTerm | Metric]:
    """What ``compute_loss`` gives. Raises ``Broken`` where the host could not use it."""
    try:
        return [item for _, item in ask(manager, "compute_loss", batch, role=role, outputs=outputs)]
    except HookFailed:
        raise
    except RunError as error:
        raise Broken(str(error)) from error


def weights_of(manager: PluginManager, batch: Experience, old_logprobs: Tensor) -> Any:
    """What ``importance_weights`` gives for the whole batch."""
    return manager.one(
        "importance_weights",
        old_logprobs=old_logprobs,
        logprobs=old_logprobs,
        sampler_logprobs=batch.sampler_logprobs,
        advantages=batch.advantages,
        mask=batch.action_mask,
        versions=batch.versions,
        version=batch.version,
    )


def _statistics(
    manager: PluginManager, role: str, head: str, batch: Experience, parts: Sequence[list[int]], model: Bigram
) -> None:
    found = Metrics()
    with torch.no_grad():
        for rows in parts:
            part = batch.batch().select(rows)
            items = ask(manager, "batch_statistics", part, role=role, outputs=model(head, part))
            found.add(item for _, item in items if isinstance(item, Metric))
    batch.stats = {**batch.stats, **found.result()}


def _spoiled(outputs: Outputs, batch: Batch) -> Outputs:
    # Added, so that a gradient at a masked position reaches the model, as it would from a real forward pass.
    garbage = torch.where(batch.action_mask, 0.0, float("nan"))

    def spoil(value: Tensor | None) -> Tensor | None:
        return None if value is None else value + garbage

    wide = garbage.unsqueeze(-1)
    others = {role: Distribution(one.logprobs + wide, one.own + wide, one.ids) for role, one in outputs.others.items()}
    logprobs, entropy, values = spoil(outputs.logprobs), spoil(outputs.entropy), spoil(outputs.values)
    return Outputs(logprobs, entropy, values, outputs.scores, outputs.logits, others)
