"""A worker's update in miniature: a bigram model, the plugin's loss hooks, the host's own reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_authoring.contracts.batches import VOCABULARY, advantages_of, is_finite, make_batch, make_groups, noise
from rlhf_authoring.contracts.subject import Subject, expect
from rlhf_host import Batch, Distribution, Experience, Group, LossTerm, Metric, Output, Outputs
from rlhf_host.internals import (
    Denominators,
    Metrics,
    PluginManager,
    Reducer,
    apply_rewards,
    ask,
    correction_weights,
    made_rows,
    no_rows,
    reduced,
)


class Bigram:
    """Next-token and value tables: differentiable, the same for a row whatever batch it stands in."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(3)
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=random).requires_grad_()
        self.head = torch.randn(VOCABULARY, generator=random).requires_grad_()
        self.parameters = [self.table, self.head]

    def __call__(self, head: str, batch: Batch, wanted: Sequence[Output] = ()) -> Outputs:
        last = torch.tensor([prompt[-1] for prompt in batch.prompt_ids])
        previous = torch.cat([last.unsqueeze(-1), batch.completion_ids[:, :-1]], dim=1)
        mask = batch.completion_mask
        if head == "scalar":
            values = torch.where(mask, self.head[previous], 0.0)
            ends = (mask.sum(-1) - 1).clamp(min=0).unsqueeze(-1)
            scores = self.head[torch.gather(batch.completion_ids, 1, ends)].squeeze(-1)
            each = torch.where(mask, self.head[batch.completion_ids], 0.0)
            return Outputs(values=values, scores=scores, token_scores=each)
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


@dataclass(slots=True)
class Updated:
    """One optimizer batch: its loss, its gradients, and what was measured."""

    loss: Tensor
    gradients: list[Tensor]
    metrics: dict[str, float]

    @property
    def finite(self) -> bool:
        return all(map(is_finite, [self.loss, *self.gradients]))


def trainable(subject: Subject) -> dict[str, str]:
    """Role → head of the roles that ``compute_loss`` is called for; the actor where the plugin declares none."""
    return {role.name: role.head for role in subject.needs.roles if role.trainable} or {"actor": "lm"}


def rows_of(subject: Subject, manager: PluginManager, groups: Sequence[Group]) -> list[Group]:
    """The groups with the rows that the plugin's ``make_rows`` makes of them, if it has this hook."""
    if "make_rows" not in subject.hooks:
        return list(groups)
    return made_rows(groups, manager)


def training_batch(subject: Subject, manager: PluginManager, groups: Sequence[Group] | None = None) -> Experience:
    """A batch as workers get it: rows chosen, or rewards shaped and advantages computed by ``manager``'s plugin (or made up);
    masks applied."""
    groups = make_groups((4, 2, 3), turns=3, seed=1) if groups is None else groups
    batch = make_batch(subject, rows_of(subject, manager, groups))
    if "compute_advantages" in subject.hooks:
        advantages_of(manager, batch)
    else:
        apply_rewards(batch, manager)
    if batch.advantages is None and "make_rows" not in subject.hooks:
        batch.advantages = torch.where(batch.action_mask, noise(batch, 70), 0.0)
        batch.returns = torch.where(batch.action_mask, noise(batch, 71), 0.0)
    for key, extra in manager.each("prepare_batch", experience=batch):
        batch.extra[manager.by_key[key].alias] = dict(extra)
    no_rows(batch, manager)
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
    parts = [(list(rows), batch.batch().select(rows)) for rows in split or [range(len(batch))]]
    with torch.no_grad():
        answers = [ask(manager, "batch_statistics", part, role=role, outputs=model(head, part)) for _, part in parts]
        statistics = reduced(item for answer in answers for _, item in answer if isinstance(item, Metric))
    reducer, metrics, total = Reducer(Denominators.of(batch)), Metrics(), torch.zeros(())
    for rows, part in parts:
        part.stats = {**batch.stats, **statistics}
        outputs = model(head, part, subject.needs.outputs)
        if spoiled:
            _spoil(outputs, part)
        corrections = correction_weights(manager, outputs, part, gates_only=False)
        for _, item in ask(manager, "compute_loss", part, role=role, outputs=outputs):
            if isinstance(item, Metric):
                metrics.add([item])
            else:
                total = total + reducer.reduce(item, rows, corrections, subject.info.name)
    return Updated(total.detach(), gradients_of(total, model.parameters), metrics.result())


def slope(terms: Sequence[LossTerm], values: Tensor, batch: Experience, alias: str) -> Tensor:
    """The derivative of the batch's loss by ``values``, of which the terms were made. Raises ``Broken`` without terms."""
    expect(terms, "compute_loss gives no loss term for the actor")
    reducer, rows = Reducer(Denominators.of(batch)), list(range(len(batch)))
    total = torch.stack([reducer.reduce(term, rows, None, alias) for term in terms]).sum()
    return gradients_of(total, [values])[0]


def gradients_of(total: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Zeros for what the total does not depend on."""
    if not total.requires_grad:
        return [torch.zeros_like(parameter) for parameter in parameters]
    return list(torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True))


def _spoil(outputs: Outputs, batch: Batch) -> None:
    # Added, so that a gradient at a masked position reaches the model, as it would from a real forward pass.
    garbage = torch.where(batch.action_mask, 0.0, float("nan"))
    for name in ("logprobs", "entropy", "values", "token_scores"):
        if (value := getattr(outputs, name)) is not None:
            setattr(outputs, name, value + garbage)
    for other in outputs.others.values():
        other.logprobs, other.own = other.logprobs + garbage.unsqueeze(-1), other.own + garbage.unsqueeze(-1)
