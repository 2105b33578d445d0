"""Checks of ``compute_advantages``: shapes, masks, invariances, extremes."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from rlhf_host.records.tensors import Advantages, Experience
from rlhf_host.testing.contracts.batches import (
    advantages_of,
    close,
    in_order,
    make_batch,
    make_groups,
    noise,
    spoil,
    widen,
    without_observations,
)
from rlhf_host.testing.contracts.subject import Subject, expect
from rlhf_host.testing.contracts.suite import check

SIZES = (4, 4, 4)


def _plain(subject: Subject, turns: int = 1, sizes: tuple[int, ...] = SIZES) -> Experience:
    """A batch whose shaped rewards are in it already, so that copies of it stay copies."""
    batch = make_batch(subject, make_groups(sizes, turns=turns))
    batch.shaped = torch.where(batch.action_mask, 0.01 * noise(batch, 99), 0.0)
    return batch


def _finite(value: Tensor | None, mask: Tensor) -> bool:
    return value is None or bool(torch.isfinite(value[mask]).all())


def _same(a: Advantages, b: Advantages, rows: list[int] | None = None, width: int | None = None) -> bool:
    """``a`` in the order of ``rows``, of the first ``width`` columns, is ``b``."""
    for x, y in ((a.advantages, b.advantages), (a.returns, b.returns)):
        if (x is None) != (y is None):
            return False
        if x is not None and y is not None and not close((x if rows is None else x[rows])[:, :width], y[:, :width]):
            return False
    return True


@check("compute_advantages")
def advantages_have_shape_and_dtype(subject: Subject) -> None:
    """Advantages, and returns where there are any, are float32 ``[B, T]``, finite on action tokens."""
    for turns in (1, 3):
        batch = _plain(subject, turns)
        found = advantages_of(subject, batch)
        for name, value in (("advantages", found.advantages), ("returns", found.returns)):
            if value is not None:
                expect(value.dtype == torch.float32, f"{name} are {value.dtype}, expected torch.float32")
                expect(_finite(value, batch.action_mask), f"{name} are not finite on action tokens")


@check("compute_advantages")
def advantages_are_zero_outside_actions(subject: Subject) -> None:
    """Padding and observations have advantage 0."""
    batch = _plain(subject, 3)
    found = advantages_of(subject, batch).advantages
    outside = found[~batch.action_mask]
    expect(bool((outside == 0).all()), "advantages are not 0 at padding and observations; use F.on_actions or torch.where")


@check("compute_advantages")
def advantages_follow_permuted_groups(subject: Subject) -> None:
    """Groups in another order have the same advantages in that order: no result depends on a group's place."""
    groups = make_groups(SIZES)
    order = [2, 0, 1]
    rows = [4 * group + sample for group in order for sample in range(4)]
    straight = advantages_of(subject, make_batch(subject, groups))
    moved = advantages_of(subject, make_batch(subject, [groups[group] for group in order]))
    expect(_same(straight, moved, rows), "groups in another order get other advantages; go by group_id, not by place")


@check("compute_advantages")
def advantages_of_unequal_groups(subject: Subject) -> None:
    """Groups of different sizes, their rows in any order, have the same advantages: groups are linked by ``group_id``."""
    batch = _plain(subject, sizes=(2, 5, 3))
    rows = [7, 2, 0, 9, 4, 1, 6, 3, 8, 5]
    moved = advantages_of(subject, in_order(batch, rows))
    straight = advantages_of(subject, batch)
    expect(_same(straight, moved, rows), "with groups of 2, 5 and 3, rows in another order get other advantages")


@check("compute_advantages")
def advantages_of_single_samples(subject: Subject) -> None:
    """A group of one gives finite numbers; where advantages compare a group's samples, it leaves the loss or gets 0."""
    batch = make_batch(subject, make_groups((3, 1, 4)))
    found = advantages_of(subject, batch, shaped=False).advantages
    expect(_finite(found, batch.action_mask), "a group of one sample makes advantages that are not finite")
    if _group_relative(subject):
        alone = torch.where(batch.loss_mask[3], found[3], 0.0)
        expect(bool((alone == 0).all()), "a sample without siblings stays in the loss with an advantage; use F.with_siblings")


@check("compute_advantages")
def advantages_of_equal_rewards(subject: Subject) -> None:
    """Groups whose rewards are all equal give advantages of exactly 0, large and inexact rewards too."""
    levels = [0.1, -1 / 3, 1e6]
    batch = make_batch(subject, make_groups((8, 8, 8), rewards=lambda group, sample: levels[group]))
    found = advantages_of(subject, batch, shaped=False).advantages
    expect(_finite(found, batch.action_mask), "equal rewards make advantages that are not finite")
    if _group_relative(subject):
        largest = float(found[batch.loss_mask].abs().max()) if bool(batch.loss_mask.any()) else 0.0
        expect(largest == 0.0, f"equal rewards in every group give advantages up to {largest:g}, expected exactly 0")


@check("compute_advantages")
def advantages_of_extreme_rewards(subject: Subject) -> None:
    """Rewards of a million and minus a million give finite advantages and returns."""
    extremes = [1e6, -1e6, 0.0, 1e6 + 1]
    for turns in (1, 3):
        batch = make_batch(subject, make_groups(SIZES, turns=turns, rewards=lambda group, sample: extremes[sample]))
        found = advantages_of(subject, batch)
        finite = _finite(found.advantages, batch.action_mask) and _finite(found.returns, batch.action_mask)
        expect(finite, "rewards of 1e6 and -1e6 make advantages or returns that are not finite")


@check("compute_advantages")
def advantages_ignore_padding(subject: Subject) -> None:
    """A wider batch has the same advantages."""
    batch = _plain(subject, 3)
    width = batch.action_mask.shape[1]
    wide = advantages_of(subject, widen(batch, 5))
    expect(_same(advantages_of(subject, batch), wide, width=width), "more padding on the right changes advantages")


@check("compute_advantages")
def advantages_ignore_masked_garbage(subject: Subject) -> None:
    """NaN at padding and observations changes nothing."""
    batch = _plain(subject, 3)
    spoiled = advantages_of(subject, spoil(batch))
    clean = advantages_of(subject, batch)
    for name, a, b in (("advantages", clean.advantages, spoiled.advantages), ("returns", clean.returns, spoiled.returns)):
        if a is not None and b is not None:
            same = close(a[batch.action_mask], b[batch.action_mask])
            expect(same, f"NaN at padding and observations changes {name}: torch.where(mask, x, 0) before it is used")


@check("compute_advantages")
def advantages_skip_observations(subject: Subject) -> None:
    """Observation tokens between action tokens leave advantages and returns as if they were not there."""
    batch = _plain(subject, 3)
    short = without_observations(batch)
    whole, cut = advantages_of(subject, batch), advantages_of(subject, short)
    for name, a, b in (("advantages", whole.advantages, cut.advantages), ("returns", whole.returns, cut.returns)):
        if a is not None and b is not None:
            same = close(a[batch.action_mask], b[short.action_mask])
            expect(same, f"observation tokens between action tokens change {name}; cut them out first (F.gae does)")


@check("compute_advantages")
def advantages_are_deterministic(subject: Subject) -> None:
    """The same batch gives the same advantages, whatever torch's random state and whichever instance."""
    found = []
    for seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            found.append(advantages_of(subject, _plain(subject, 3)).advantages)
    expect(torch.equal(found[0], found[1]), "the same batch gives other advantages the second time")


@check("compute_advantages")
def advantages_leave_the_batch_alone(subject: Subject) -> None:
    """``compute_advantages`` changes no tensor of the batch: what it sees is trained on next."""
    batch = _plain(subject, 3)
    manager = subject.manager()
    before = {f.name: _copy(getattr(batch, f.name)) for f in dataclasses.fields(batch)}
    manager.one("compute_advantages", experience=batch)
    for name, value in before.items():
        now = getattr(batch, name)
        for part, tensor in value.items() if isinstance(value, dict) else [("", value)]:
            current = now.get(part) if isinstance(value, dict) else now
            if isinstance(tensor, Tensor):
                same = isinstance(current, Tensor) and torch.equal(current.nan_to_num(7.0), tensor.nan_to_num(7.0))
                expect(same, f"it changes experience.{name}{f'[{part!r}]' if part else ''}; work on a copy")


def _copy(value: object) -> object:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def _group_relative(subject: Subject) -> bool:
    return subject.needs.min_group_size > 1 if subject.group_relative is None else subject.group_relative
