"""Checks of ``compute_advantages``: shapes, masks, invariances, extremes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_authoring.contracts import batches
from rlhf_authoring.contracts.batches import is_finite, make_batch, make_groups
from rlhf_authoring.contracts.session import Session, check_running
from rlhf_authoring.contracts.subject import Subject, check, expect
from rlhf_host import Experience, Trajectory

SIZES = (4, 4, 4)


def _batch(subject: Subject, turns: int = 1, sizes: tuple[int, ...] = SIZES) -> Experience:
    """A batch whose shaped rewards are in it already, so that copies of it stay copies."""
    batch = make_batch(subject, make_groups(sizes, turns=turns))
    batch.shaped = torch.where(batch.action_mask, 0.01 * batches.noise(batch, 99), 0.0)
    return batch


def _advantages(subject: Subject, batch: Experience, *, shaped: bool = True) -> dict[str, Tensor]:
    """``advantages``, and ``returns`` where there are any, of a fresh instance."""
    answer = batches.advantages_of(subject.manager(), batch, shaped=shaped)
    return {"advantages": answer.advantages} | ({} if answer.returns is None else {"returns": answer.returns})


def _expect_same(
    subject: Subject, batch: Experience, changed: Experience, message: str, rows: Sequence[int] | None = None
) -> None:
    """``changed``, whose rows are those ``rows`` of ``batch``, has the same numbers at action tokens."""
    there, here = _advantages(subject, changed), _advantages(subject, batch)
    order = list(range(len(batch)) if rows is None else rows)
    for name, values in here.items():
        same = name in there and batches.close(values[order][batch.action_mask[order]], there[name][changed.action_mask])
        expect(same, message.format(name))


@check("compute_advantages")
def advantages_have_shape_and_dtype(subject: Subject) -> None:
    """Advantages, and returns where there are any, are float32 ``[B, T]``, finite on action tokens."""
    for turns in (1, 3):
        batch = _batch(subject, turns)
        for name, values in _advantages(subject, batch).items():
            expect(values.dtype == torch.float32, f"{name} are {values.dtype}, expected torch.float32")
            expect(is_finite(values, batch.action_mask), f"{name} are not finite on action tokens")


@check("compute_advantages")
def advantages_are_zero_outside_actions(subject: Subject) -> None:
    """Padding and observations have advantage 0."""
    batch = _batch(subject, 3)
    outside = _advantages(subject, batch)["advantages"][~batch.action_mask]
    expect(bool((outside == 0).all()), "advantages are not 0 at padding and observations; use F.on_actions or torch.where")


@check("compute_advantages")
def advantages_follow_permuted_groups(subject: Subject) -> None:
    """Groups in another order have the same advantages in that order: no result depends on a group's place."""
    groups, order = make_groups(SIZES), [2, 0, 1]
    moved = make_batch(subject, [groups[group] for group in order])
    message = "groups in another order get other {}; go by group_id, not by place"
    rows = [4 * group + sample for group in order for sample in range(4)]
    _expect_same(subject, make_batch(subject, groups), moved, message, rows)


@check("compute_advantages")
def advantages_of_unequal_groups(subject: Subject) -> None:
    """Groups of different sizes, their rows in any order, have the same advantages: groups are linked by ``group_id``."""
    batch, rows = _batch(subject, sizes=(2, 5, 3)), [7, 2, 0, 9, 4, 1, 6, 3, 8, 5]
    message = "with groups of 2, 5 and 3, rows in another order get other {}"
    _expect_same(subject, batch, batches.in_order(batch, rows), message, rows)


@check("compute_advantages")
def advantages_of_single_samples(subject: Subject) -> None:
    """A group of one gives finite numbers, although its rows leave the loss where ``needs`` have a ``min_group_size``."""
    batch = make_batch(subject, make_groups((3, 1, 4)))
    advantages = _advantages(subject, batch, shaped=False)["advantages"]
    expect(is_finite(advantages, batch.action_mask), "a group of one sample makes advantages that are not finite")


@check("compute_advantages")
def advantages_of_equal_rewards(subject: Subject) -> None:
    """Groups whose rewards are all equal give advantages of exactly 0, large and inexact rewards too."""
    levels = [0.1, -1 / 3, 1e6]
    batch = make_batch(subject, make_groups((8, 8, 8), rewards=lambda group, sample: levels[group]))
    advantages = _advantages(subject, batch, shaped=False)["advantages"]
    expect(is_finite(advantages, batch.action_mask), "equal rewards make advantages that are not finite")
    if subject.needs.min_group_size > 1:
        largest = max(advantages[batch.loss_mask].abs().tolist(), default=0.0)
        expect(largest == 0.0, f"equal rewards in every group give advantages up to {largest:g}, expected exactly 0")


@check("compute_advantages")
def advantages_of_extreme_rewards(subject: Subject) -> None:
    """Rewards of a million and minus a million give finite advantages and returns."""
    extremes = [1e6, -1e6, 0.0, 1e6 + 1]
    for turns in (1, 3):
        batch = make_batch(subject, make_groups(SIZES, turns=turns, rewards=lambda group, sample: extremes[sample]))
        for name, values in _advantages(subject, batch).items():
            expect(is_finite(values, batch.action_mask), f"rewards of 1e6 and -1e6 make {name} that are not finite")


@check("compute_advantages")
def advantages_ignore_padding(subject: Subject) -> None:
    """A wider batch has the same advantages."""
    batch = _batch(subject, 3)
    _expect_same(subject, batch, batches.widen(batch, 5), "more padding on the right changes {}")


@check("compute_advantages")
def advantages_ignore_masked_garbage(subject: Subject) -> None:
    """NaN at padding and observations changes nothing."""
    batch = _batch(subject, 3)
    message = "NaN at padding and observations changes {}: torch.where(mask, x, 0) before it is used"
    _expect_same(subject, batch, batches.spoil(batch), message)


@check("compute_advantages")
def advantages_skip_observations(subject: Subject) -> None:
    """Observation tokens between action tokens leave advantages and returns as if they were not there."""
    batch = _batch(subject, 3)
    message = "observation tokens between action tokens change {}; cut them out first (F.gae does)"
    _expect_same(subject, batch, batches.without_observations(batch), message)


@check("compute_advantages")
def advantages_are_deterministic(subject: Subject) -> None:
    """The same batch gives the same advantages, whatever torch's random state and whichever instance."""
    runs = []
    for seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            runs.append(_advantages(subject, _batch(subject, 3))["advantages"])
    expect(torch.equal(*runs), "the same batch gives other advantages the second time")


@check("compute_advantages")
def advantages_rise_with_the_reward(subject: Subject) -> None:
    """A sample that is rewarded more gets no smaller advantage, and some sample a larger one."""
    if not subject.needs.rewards:
        return
    rises = []
    for raised in ((0, 1), (1, 2), (2, 0)):
        sums = []
        for more in (0.0, 1.0):

            def reward(group: int, sample: int, raised: tuple[int, int] = raised, more: float = more) -> float:
                return (7 * group + 3 * sample) % 5 / 2 + more * ((group, sample) == raised)

            batch = make_batch(subject, make_groups(SIZES, rewards=reward))
            row = 4 * raised[0] + raised[1]
            sums.append(float(_advantages(subject, batch, shaped=False)["advantages"][row].sum()))
        rises.append(sums[1] - sums[0])
    expect(min(rises) > -1e-5 and max(rises) > 1e-5, "a larger reward makes a smaller advantage; check its sign")


@check_running("rewrite_prompts")
def rewritten_prompts_fit_the_rows(session: Session) -> None:
    """Every frozen role that is named gets one prompt of tokens per row, and the same ones again for the same batch."""
    batch = make_batch(session.subject, make_groups(SIZES))
    batch.prompts = {}
    answers = [session.manager.one("rewrite_prompts", experience=batch) or {} for _ in range(2)]
    frozen = {need.name for need in session.subject.needs.roles if not need.trainable}
    for role, prompts in answers[0].items():
        expect(role in frozen, f"rewrite_prompts names the role {role!r}, and needs has the frozen roles {sorted(frozen)}")
        expect(len(prompts) == len(batch), f"rewrite_prompts gives {len(prompts)} prompts for {len(batch)} rows")
        expect(all(map(len, prompts)), "rewrite_prompts gives a prompt without tokens")
    same = [{role: [list(ids) for ids in prompts] for role, prompts in answer.items()} for answer in answers]
    expect(same[0] == same[1], "rewrite_prompts gives other prompts for the same batch")


def tokens_of(row: Trajectory) -> list[tuple[str, list[int]]]:
    """Returns the kinds and tokens of a row's segments."""
    return [(segment.kind, list(segment.token_ids)) for segment in row.segments]


@check("make_rows")
def made_rows_are_of_the_samples(subject: Subject) -> None:
    """``make_rows`` gives the same rows every time: samples with the tokens that they were given with, none twice."""
    groups = make_groups(SIZES, turns=1)
    given = {(row.group_id, row.sample): tokens_of(row) for group in groups for row in group.trajectories}
    managers = [subject.manager(), subject.manager()]
    first, second, fresh = (list(one.one("make_rows", groups=groups)) for one in (managers[0], *managers))
    expect(first, "make_rows gives no row of groups whose rewards differ")
    expect(first == second == fresh, "make_rows gives other rows the second time")
    names = [(row.group_id, row.sample) for row in first]
    expect(len(set(names)) == len(names), "make_rows gives a sample twice")
    strange = [row for row, name in zip(first, names, strict=True) if given.get(name) != tokens_of(row)]
    expect(not strange, "make_rows gives a row with other tokens than the sample's")
