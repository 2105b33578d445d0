"""Checks of algorithms that train on a data set: exact over units, blind to what is masked, finite, of the label's sign."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_authoring.contracts.batches import apart, close, in_order, is_finite, noise
from rlhf_authoring.contracts.loss import agree, cases, expect_blind, expect_exact, expect_pure, term_is_well_formed
from rlhf_authoring.contracts.offline_batches import (
    again,
    logprobs_now,
    make_units,
    offline_batch,
    prepare,
    whole_units,
)
from rlhf_authoring.contracts.subject import Subject, check, expect
from rlhf_authoring.contracts.training import Bigram, Updated, slope, trainable, update
from rlhf_host import Experience, LossTerm, Metric, Output
from rlhf_host.internals import PluginManager, ask, reduced


def _expect_finite(name: str, updated: Updated, why: str) -> None:
    expect(updated.finite, f"{name}{why} a loss or gradient that is not finite")
    wrong = [metric for metric, value in updated.metrics.items() if not math.isfinite(value)]
    expect(not wrong, f"{name}{why} metrics that are not finite: {', '.join(wrong)}")


@check("compute_loss")
def items_of_units_are_well_formed(subject: Subject) -> None:
    """Loss terms have masks that exist and the batch's shape; metrics are finite numbers."""
    expect(subject.choices, "no value of the option loss is accepted with these options")
    for name, manager, role, batch in cases(subject, offline_batch):
        terms, metrics = _items(subject, manager, role, batch)
        for term in terms:
            term_is_well_formed(name, term, batch, subject.info.name)
        for metric in metrics:
            finite = is_finite(torch.as_tensor(metric.values, dtype=torch.float64), metric.mask)
            expect(finite, f"{name}metric {metric.name!r} is not finite where it counts")


@check("compute_loss")
def loss_of_units_is_pure(subject: Subject) -> None:
    """The same batch gives the same loss twice, on instances that did and did not make its rows."""
    expect_pure(subject, offline_batch)


@check("compute_loss")
def loss_of_units_is_the_same_however_split(subject: Subject) -> None:
    """Loss and gradient are the same for the whole batch at once, unit by unit, and in uneven parts of whole units."""
    for name, manager, role, batch in cases(subject, offline_batch):
        units = whole_units(batch)
        uneven = [units[0] + units[3], units[1], [row for unit in (units[2], *units[4:]) for row in unit]]
        expect_exact(subject, name, manager, role, batch, [units, uneven])


@check("compute_loss")
def loss_of_units_is_the_same_in_any_order(subject: Subject) -> None:
    """Rows in another order, those of a unit apart from each other, give the same loss, gradient and metrics."""
    for name, manager, role, batch in cases(subject, offline_batch):
        here = update(subject, manager, role, batch)
        there = update(subject, manager, role, in_order(batch, apart(len(batch))))
        message = "depend on the order of rows; go by unit_id and columns, as losses.pairs of rlhf-rows does"
        expect(agree(here, there), f"{name}loss or gradient {message}")
        same = all(math.isclose(there.metrics[key], value, rel_tol=1e-4, abs_tol=1e-6) for key, value in here.metrics.items())
        expect(same, f"{name}metrics {message}")


@check("compute_loss")
def units_in_a_batch_twice_change_nothing(subject: Subject) -> None:
    """All units a second time in the batch give the same mean loss and gradient: none counts by its place or for the others."""
    for name, manager, role, batch in cases(subject, offline_batch):
        units = make_units(str(subject.needs.data))
        twice = update(subject, manager, role, offline_batch(subject, manager, [*units, *again(units)]))
        same = agree(update(subject, manager, role, batch), twice)
        expect(same, f"{name}every unit twice gives another mean loss: leave the mean over the batch to the host")


@check("compute_loss")
def loss_of_one_unit_is_finite(subject: Subject) -> None:
    """A batch of one unit, as the last of an epoch may be, gives a finite loss, gradient and metrics."""
    for name, manager, role, _ in cases(subject, offline_batch):
        for unit in make_units(str(subject.needs.data), 2):
            _expect_finite(name, update(subject, manager, role, offline_batch(subject, manager, [unit])), "a unit alone gives")


@check("compute_loss")
def loss_of_units_ignores_masked_garbage(subject: Subject) -> None:
    """NaN at padding and observations, in outputs, batch and other roles' log-probabilities, changes nothing."""
    expect_blind(subject, offline_batch)


@check("compute_loss")
def loss_of_units_ignores_a_missing_margin(subject: Subject) -> None:
    """Without the column ``margin``, which data may have, the loss is as if all its values were NaN (none)."""
    for name, manager, role, batch in cases(subject, offline_batch):
        if "margin" in batch.columns:
            batch.columns["margin"] = torch.full_like(batch.columns["margin"], float("nan"))
            none = update(subject, manager, role, batch)
            del batch.columns["margin"]
            same = agree(none, update(subject, manager, role, batch))
            expect(same, f"{name}a margin of NaN changes the loss; NaN says that the unit has none")


@check("compute_loss")
def loss_of_units_is_finite_at_extreme_gaps(subject: Subject) -> None:
    """Log-probabilities 50 nats per token apart from those of other roles give finite losses, gradients and metrics."""
    for name, manager, role, batch in cases(subject, offline_batch):
        sign = torch.where(noise(batch, 60)[:, :1] > 0, 50.0, -50.0)  # one for a row, so that its sums are large
        batch.logprobs = {other: value + sign * batch.completion_mask for other, value in batch.logprobs.items()}
        _expect_finite(name, update(subject, manager, role, batch), "log-probabilities 50 nats apart make")


@check("compute_loss")
def loss_of_units_is_finite_when_masked_out(subject: Subject) -> None:
    """Units without a token in the loss, and a micro-batch of nothing else, give finite losses, gradients and metrics."""
    for name, manager, role, batch in cases(subject, offline_batch):
        units = whole_units(batch)
        for emptied in (units[0] + units[2], list(range(len(batch)))):
            batch.action_mask[emptied] = batch.loss_mask[emptied] = False
            prepare(manager, batch)
            for split in (None, units):
                why = "fully masked rows (divide by max(count, 1)) make"
                _expect_finite(name, update(subject, manager, role, batch, split), why)


@check("compute_loss")
def loss_has_the_sign_of_the_label(subject: Subject) -> None:
    """The loss falls on the way on which log-probabilities, or scores, of chosen and unlabelled rows and of right steps rise and
    those of rejected rows and wrong steps fall, wherever the rows are; the reference is as the actor at the middle of the way."""
    for name, manager, role, batch in cases(subject, offline_batch):
        if role != "actor":
            continue
        what, now = _what_is_read(subject, role), logprobs_now(batch)
        batch.logprobs = {other: now.clone() for other in batch.logprobs}
        labels = [(columns, name) for columns, name in _labels(batch) if name in columns]
        for flipped in (False, True) if labels else (False,):
            if flipped:
                for columns, name in labels:
                    columns[name] = 1 - columns[name]
                prepare(manager, batch)
            side = 2 * batch.columns.get("label", torch.ones(len(batch))).nan_to_num(1.0) - 1
            if what == "token_scores":
                side = (2 * batch.token_columns["step"] - 1).nan_to_num(0.0)
            step = -0.9 * now * side.unsqueeze(-1) * batch.loss_mask if what == "logprobs" else side
            start = now if what == "logprobs" else torch.zeros(side.shape)
            # Along the way, and not at one place: some losses have a region of the other sign, some have no value of their own.
            fall = sum(
                float((_slope(subject, manager, batch, start + part * step) * step).sum()) for part in (-1, -0.5, 0, 0.5, 1)
            )
            message = "the loss must fall as chosen rows get likelier, and rise with rejected ones; check signs and labels"
            elsewhere = fall == 0 and any(output.what == "distribution" for output in subject.needs.outputs)
            expect(fall < 0 or elsewhere, f"{name}{message}")


@check("compute_loss")
def sigmoid_loss_moves_with_the_reference(subject: Subject) -> None:
    """The gradient of the loss ``sigmoid`` is the same when policy and reference get likelier together: it sees their ratio."""
    if Output("logprobs", "reference") not in subject.needs.outputs:
        return
    for choice in subject.choices:
        if {**subject.options, **choice}.get("loss") == "sigmoid" and trainable(subject).get("actor") == "lm":
            manager = subject.manager(**choice)
            batch = offline_batch(subject, manager)
            now, moved = logprobs_now(batch), torch.where(batch.completion_mask, noise(batch, 62), 0.0)
            before = _slope(subject, manager, batch, now)
            batch.logprobs["reference"] = batch.logprobs["reference"] + moved
            same = close(before, _slope(subject, manager, batch, now + moved))
            expect(same, "loss=sigmoid: it changes when policy and reference change alike; compare log π − log ref")


@check("make_rows")
def made_rows_are_of_the_data(subject: Subject) -> None:
    """``make_rows`` gives the same rows every time; those in the loss are rows that it was given, with their labels, none twice."""
    units = make_units(str(subject.needs.data))
    given = [row for unit in units for row in unit.trajectories]
    manager = subject.manager()
    first, second, fresh = (list(one.one("make_rows", groups=units)) for one in (manager, manager, subject.manager()))
    expect(first == second == fresh, "make_rows gives other rows the second time")
    batch = offline_batch(subject, manager, units)
    trained = [row for row, mask in zip(batch.trajectories, batch.loss_mask, strict=True) if mask.any()]
    ids = [(row.episode_id, row.row) for row in trained]
    expect(len(set(ids)) == len(ids), "a row is in the loss twice; keep one, or leave the other out with loss_masks")
    known = {(row.episode_id, row.row): row for row in given}
    strange = [row for row, key in zip(trained, ids, strict=True) if key not in known]
    message = "a row in the loss is not of the data; leave rows that only statistics need out with loss_masks"
    expect(not strange, message)
    changed = any(row.segments != known[key].segments for row, key in zip(trained, ids, strict=True))
    expect(not changed, "a row in the loss has other tokens than the data's")


def _items(
    subject: Subject, manager: PluginManager, role: str, batch: Experience, values: Tensor | None = None
) -> tuple[list[LossTerm], list[Metric]]:
    """Returns loss terms and metrics of the batch in one part, after its statistics. ``values`` are in place of the model's
    log-probabilities, or scores.
    """
    part, head = batch.batch(), trainable(subject)[role]
    outputs = Bigram()(head, part, subject.needs.outputs)
    if values is not None:
        setattr(outputs, _what_is_read(subject, role), values)
    with torch.no_grad():
        answers = list(ask(manager, "batch_statistics", part, role=role, outputs=outputs))
    part.stats = reduced(item for _, item in answers if isinstance(item, Metric))
    items = [item for _, item in ask(manager, "compute_loss", part, role=role, outputs=outputs)]
    return [item for item in items if isinstance(item, LossTerm)], [item for item in items if isinstance(item, Metric)]


def _what_is_read(subject: Subject, role: str) -> str:
    """The output that the role's loss is made of."""
    if trainable(subject)[role] != "scalar":
        return "logprobs"
    return "token_scores" if Output("token_scores") in subject.needs.outputs else "scores"


def _labels(batch: Experience) -> list[tuple[dict[str, Tensor], str]]:
    """Returns columns in which 1 is good and 0 is bad."""
    return [(batch.columns, "label"), (batch.token_columns, "step")]


def _slope(subject: Subject, manager: PluginManager, batch: Experience, values: Tensor) -> Tensor:
    """The loss's derivative by each log-probability ``[B, T]`` of the actor, or by each score ``[B]`` or ``[B, T]``, at
    ``values``."""
    values = values.clone().requires_grad_()
    terms, _ = _items(subject, manager, "actor", batch, values)
    return slope(terms, values, batch, subject.info.name)
