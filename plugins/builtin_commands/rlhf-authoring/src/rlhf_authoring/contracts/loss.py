"""Checks of ``compute_loss``: exact under splitting, blind to what is masked, finite at extremes, of the right sign."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from rlhf_authoring.contracts import training
from rlhf_authoring.contracts.batches import close, is_finite, noise, spoil, widen, without_some
from rlhf_authoring.contracts.subject import Broken, Subject, check, expect
from rlhf_authoring.contracts.training import Updated, trainable, training_batch, update
from rlhf_host import AlgoNeeds, Experience, LossTerm, Metric
from rlhf_host.internals import Denominators, PluginManager, Reducer, ask, group_rows


def cases(
    subject: Subject, build: Callable[[Subject, PluginManager], Experience] = training_batch
) -> Iterator[tuple[str, PluginManager, str, Experience]]:
    """Every loss on offer × every trainable role: how to call it, a worker's instance, the role and its batch."""
    for choice in subject.choices:
        controller = subject.manager(**choice)
        for role in trainable(subject):
            name = "".join(f"loss={value}: " for value in choice.values()) + ("" if role == "actor" else f"{role}: ")
            # Workers have instances of their own, which never saw the batch being made.
            yield name, subject.manager(**choice), role, build(subject, controller)


def agree(a: Updated, b: Updated) -> bool:
    """Same loss and gradients, to rounding."""
    return all(map(close, [a.loss, *a.gradients], [b.loss, *b.gradients]))


@check("compute_loss")
def loss_items_are_well_formed(subject: Subject) -> None:
    """Loss terms have masks that exist and the batch's shape; metrics are finite numbers."""
    for name, manager, role, batch in cases(subject):
        part = batch.select(range(len(batch)))
        outputs = training.Bigram()(trainable(subject)[role], part, subject.needs.outputs)
        for _, item in ask(manager, "compute_loss", part, role=role, outputs=outputs):
            if isinstance(item, Metric):
                finite = is_finite(torch.as_tensor(item.values, dtype=torch.float64), item.mask)
                expect(finite, f"{name}metric {item.name!r} is not finite where it counts")
            else:
                term_is_well_formed(name, item, part, subject.info.name)


def term_is_well_formed(name: str, term: LossTerm, batch: Experience, alias: str) -> None:
    """Raises ``Broken`` for a loss term that the host cannot reduce, or whose values are not finite."""
    who, whole = f"{name}loss term {term.name!r}", Denominators.of(batch)
    expect(math.isfinite(term.coefficient), f"{who} has coefficient {term.coefficient}")
    try:
        Reducer(whole).reduce(term, list(range(len(batch))), None, alias)
    except ValueError as error:
        raise Broken(f"{name}{error}") from error
    counted = None if term.values.dim() == 1 else whole.mask(term.mask, alias)
    expect(is_finite(term.values, counted), f"{who} is not finite where its mask counts")


@check("compute_loss")
def loss_is_pure(subject: Subject) -> None:
    """The same batch gives the same loss twice, on instances that did and did not compute its advantages."""
    expect_pure(subject, training_batch)


def expect_pure(subject: Subject, build: Callable[[Subject, PluginManager], Experience]) -> None:
    """Raises ``Broken`` for a loss that instances do not agree on."""
    controller = subject.manager()
    batch = build(subject, controller)
    for role in trainable(subject):
        first, *others = (update(subject, manager, role, batch) for manager in (controller, subject.manager(), controller))
        message = f"the loss of {role} depends on more than its arguments; what a worker must know travels in batch.extra"
        expect(all(agree(first, other) for other in others), message)


@check("compute_loss")
def loss_is_the_same_however_split(subject: Subject) -> None:
    """Loss and gradient are the same for the whole batch at once, row by row, and in uneven parts."""
    for name, manager, role, batch in cases(subject):
        units = _units(subject, batch)
        cut = len(units) // 2 + 1
        uneven = [[row for unit in part for row in unit] for part in (units[cut:], units[:1], units[1:cut])]
        expect_exact(subject, name, manager, role, batch, [units, [part for part in uneven if part]])


def _units(subject: Subject, batch: Experience) -> list[list[int]]:
    """The smallest micro-batches that there may be."""
    return group_rows(batch.unit_id.tolist()) if AlgoNeeds.of(subject.needs).unit_rows else [[row] for row in range(len(batch))]


def expect_exact(
    subject: Subject, name: str, manager: PluginManager, role: str, batch: Experience, splits: Sequence[Sequence[Sequence[int]]]
) -> None:
    """Raises ``Broken`` for a loss or gradient that is another one in one of the splits into micro-batches."""
    whole = update(subject, manager, role, batch)
    for split in splits:
        same = agree(whole, update(subject, manager, role, batch, split))
        message = "the gradient depends on how the batch is split into micro-batches; return unreduced values"
        expect(same, f"{name}{message}")


@check("compute_loss")
def loss_ignores_masked_garbage(subject: Subject) -> None:
    """NaN at padding and observations, in outputs and batch, changes neither loss, gradient nor metrics."""
    expect_blind(subject, training_batch)


def expect_blind(subject: Subject, build: Callable[[Subject, PluginManager], Experience]) -> None:
    """Raises ``Broken`` where NaN at masked positions changes loss, gradient or metrics."""
    for name, manager, role, batch in cases(subject, build):
        clean = update(subject, manager, role, batch)
        dirty = update(subject, manager, role, widen(spoil(batch), 3, fill=float("nan")), spoiled=True)
        expect(agree(clean, dirty), f"{name}NaN at masked positions changes loss or gradient: torch.where(mask, x, 0) first")
        for metric, value in clean.metrics.items():
            same = math.isclose(dirty.metrics.get(metric, math.nan), value, rel_tol=1e-4, abs_tol=1e-6)
            expect(same, f"{name}NaN at masked positions changes the metric {metric!r}; give it a mask")


@check("compute_loss")
def loss_is_finite_at_extreme_gaps(subject: Subject) -> None:
    """Log-probabilities 50 nats apart from the old policy's, the sampler's or the reference's give finite gradients."""
    for name, manager, role, batch in cases(subject):
        gap = torch.where(noise(batch, 60) > 0, 50.0, -50.0) * batch.action_mask
        assert batch.old_logprobs is not None
        batch.old_logprobs += gap
        batch.sampler_logprobs -= gap
        batch.logprobs = {other: value + gap for other, value in batch.logprobs.items()}
        finite = update(subject, manager, role, batch).finite
        expect(finite, f"{name}log-probabilities 50 nats apart make a loss or gradient that is not finite; clamp before exp")


@check("compute_loss")
def loss_is_finite_where_the_sampler_is_unknown(subject: Subject) -> None:
    """Loss and gradient are finite where the sampler's log-probabilities are NaN, in a whole row and in parts of others."""
    for name, manager, role, batch in cases(subject):
        batch.sampler_logprobs = without_some(batch)
        finite = update(subject, manager, role, batch).finite
        expect(finite, f"{name}tokens that nothing sampled make a loss that is not finite; use batch.sampled_mask")


@check("compute_loss")
def loss_is_finite_when_masked_out(subject: Subject) -> None:
    """Rows without a token in the loss, and a micro-batch of nothing else, give a finite loss and gradient."""
    for name, manager, role, batch in cases(subject):
        units = _units(subject, batch)
        for emptied in ([*units[0], *units[len(units) // 2]], list(range(len(batch)))):
            batch.action_mask[emptied] = batch.loss_mask[emptied] = False
            for split in (None, units):
                finite = update(subject, manager, role, batch, split).finite
                message = "fully masked rows make a loss or gradient that is not finite; divide by max(count, 1)"
                expect(finite, f"{name}{message}")


@check("compute_loss")
def loss_choices_are_finite(subject: Subject) -> None:
    """Every loss on offer trains: some term for a trainable role, finite, with the old log-probabilities and without."""
    expect(subject.choices, "no value of the option loss is accepted with these options")
    for name, manager, role, batch in cases(subject):
        for old_logprobs in (batch.old_logprobs, None):
            batch.old_logprobs = old_logprobs
            expect(update(subject, manager, role, batch).finite, f"{name}the loss or its gradient is not finite")


@check("compute_advantages")
def raising_a_good_token_lowers_the_loss(subject: Subject) -> None:
    """On policy, the loss falls as the log-probabilities of a row with positive advantages rise, and the other way round."""
    if "compute_loss" not in subject.hooks or trainable(subject).get("actor") != "lm" or not subject.needs.rewards:
        return  # without rewards the signal is not in the advantages
    if "rewrite_prompts" in subject.hooks:
        return  # it is a teacher's too
    for name, manager, role, batch in cases(subject):
        if role == "actor":
            # One sign for a row, so that losses of whole rows have it too.
            sign = torch.where(noise(batch, 61)[:, :1] > 0, 1.0, -1.0).expand(batch.action_mask.shape)
            batch.advantages, batch.old_logprobs = sign * batch.action_mask, None
            pulled = -_logprob_gradient(subject, manager, batch).sign() == sign
            message = "where the advantage is positive the loss must fall as the log-probability rises; check the loss's sign"
            expect(bool(pulled[batch.loss_mask].all()), f"{name}{message}")


def _logprob_gradient(subject: Subject, manager: PluginManager, batch: Experience) -> Tensor:
    """``[B, T]``: the loss's derivative by each log-probability."""
    part = batch.select(range(len(batch)))
    outputs = training.Bigram()("lm", part, subject.needs.outputs)
    assert outputs.logprobs is not None
    outputs.logprobs = outputs.logprobs.detach().requires_grad_()
    items = ask(manager, "compute_loss", part, role="actor", outputs=outputs)
    terms = [item for _, item in items if isinstance(item, LossTerm)]
    return training.slope(terms, outputs.logprobs, batch, subject.info.name)
