"""Checks of the hooks that filter, reshape and correct: whichever of them a plugin has."""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf_authoring.contracts.batches import (
    apart,
    close,
    in_order,
    is_finite,
    make_batch,
    make_groups,
    noise,
    spoil,
    widen,
    without_some,
)
from rlhf_authoring.contracts.offline_batches import offline_batch
from rlhf_authoring.contracts.session import METRICS
from rlhf_authoring.contracts.subject import Subject, check, expect
from rlhf_authoring.contracts.training import rows_of, training_batch
from rlhf_host import Adjust, Drop, Episode, Experience, Group, PolicyLogprobs, Stop, Task
from rlhf_host.internals import PluginManager, plain_state, reduced

SIZES = (4, 2, 3)


def _batch(subject: Subject) -> Experience:
    if subject.offline:
        return offline_batch(subject, subject.manager())
    return make_batch(subject, rows_of(subject, subject.manager(), make_groups(SIZES, turns=3, seed=2)))


def _expect_garbage_ignored(call: Callable[[Experience], Any], batch: Experience, hook: str) -> None:
    clean, dirty = call(batch.select(range(len(batch)))), call(widen(spoil(batch), 3, fill=float("nan")))
    if clean is not None:
        if clean.dim() == 2:
            clean, dirty = clean[batch.action_mask], dirty[:, : clean.shape[1]][batch.action_mask]
        same = close(clean.float(), dirty.float())
        expect(same, f"{hook}: NaN at padding and observations changes the result; torch.where(mask, x, 0) first")


def _groups() -> list[Group]:
    """All solved, none solved, mixed, without scores, one sample alone, cut by length."""
    known: list[list[Any]] = [[1.0] * 4, [0.0] * 4, [0.0, 1.0, 1.0, 0.0], [None] * 4, [1.0], [0.5, 0.2, 0.9]]
    groups = make_groups([len(scores) for scores in known])
    for group, scores in zip(groups, known, strict=True):
        for trajectory, score in zip(group.trajectories, scores, strict=True):
            trajectory.score = score
            trajectory.finish_reason = "length" if group is groups[-1] else "stop"
    return groups


@check("keep_group")
def keep_group_gives_true_or_drop(subject: Subject) -> None:
    """``True`` or ``Drop(reason)`` for every group: solved, unsolved, mixed, without scores, of one sample."""
    manager = subject.manager()
    for group in _groups():
        verdict = manager.one("keep_group", group=group)
        scores = [trajectory.score for trajectory in group.trajectories]
        known = verdict is True or isinstance(verdict, Drop)
        expect(known, f"keep_group gave {verdict!r} for scores {scores}; return True or Drop(reason)")
        reasoned = verdict is True or verdict.reason.strip()
        expect(reasoned, "keep_group gave a Drop without a reason; reasons are counted and shown")


@check("keep_group")
def keep_group_goes_by_the_group(subject: Subject) -> None:
    """The same group gets the same verdict from another instance and with its trajectories in another order."""
    for group in _groups():
        first, again, other = (subject.manager().one("keep_group", group=one) for one in (group, group, turned(group)))
        expect(again == first, "keep_group gives another verdict the second time")
        expect(other == first, "keep_group depends on the order of the trajectories")


def turned(group: Group) -> Group:
    """With its last trajectory first."""
    return dataclasses.replace(group, trajectories=group.trajectories[::-1])


def _call(subject: Subject, hook: str, batch: Experience) -> Any:
    """A fresh instance's answer; only ``transform_rewards`` has the argument ``rewards``."""
    return subject.manager().one(hook, experience=batch, rewards=batch.rewards.clone())


@check("transform_rewards")
def transformed_rewards_have_shape(subject: Subject) -> None:
    """``[B]`` and finite, for rewards of a million and minus a million too."""
    extremes = [1e6, -1e6, 0.0, 1.0]
    for batch in (_batch(subject), make_batch(subject, make_groups(SIZES, rewards=lambda group, sample: extremes[sample]))):
        rewards = _call(subject, "transform_rewards", batch)
        expect(is_finite(rewards), "transform_rewards gave numbers that are not finite")


@check("shape_rewards")
def shaped_rewards_have_shape(subject: Subject) -> None:
    """``[B, T]`` and finite on action tokens, or ``None``."""
    batch = _batch(subject)
    shaped = _call(subject, "shape_rewards", batch)
    if shaped is not None:
        expect(is_finite(shaped, batch.action_mask), "shape_rewards gave numbers that are not finite")


@check("loss_masks")
def loss_masks_are_bool(subject: Subject) -> None:
    """``[B, T]`` bool, or ``None``: the host refuses any other."""
    _call(subject, "loss_masks", _batch(subject))


def _check_rows(hook: str, results: str) -> None:
    """Add the checks that hooks over the rows of a batch have alike."""

    def follow_rows(subject: Subject) -> None:
        batch = _batch(subject)
        straight, moved = (_call(subject, hook, in_order(batch, rows)) for rows in (range(len(batch)), apart(len(batch))))
        same = straight is None or close(straight[apart(len(batch))].float(), moved.float())
        expect(same, f"{hook}: rows in another order get other results")

    def ignore_masked_garbage(subject: Subject) -> None:
        _expect_garbage_ignored(partial(_call, subject, hook), _batch(subject), hook)

    follow_rows.__doc__ = f"Rows in another order have the same {results.replace('_', ' ')} in that order."
    ignore_masked_garbage.__doc__ = "Padding, and NaN at padding and observations, change nothing."
    for function in (follow_rows, ignore_masked_garbage):
        function.__name__ = f"{results}_{function.__name__}"
        check(hook)(function)


_check_rows("transform_rewards", "transformed_rewards")
_check_rows("shape_rewards", "shaped_rewards")
_check_rows("loss_masks", "loss_masks")


def _correction_batch(subject: Subject) -> Experience:
    batch = training_batch(subject, subject.manager())
    batch.advantages = torch.where(batch.action_mask, noise(batch, 80), 0.0)
    batch.old_logprobs = torch.where(batch.action_mask, batch.sampler_logprobs + 0.5 * noise(batch, 81), 0.0)
    return batch


def _weights(subject: Subject, batch: Experience) -> Any:
    """Returns what ``importance_weights`` gives for the whole batch, as ``[B, T]``, whichever shape it has."""
    assert batch.old_logprobs is not None
    batch.own = batch.extra.get(subject.info.name, {})
    logprobs = PolicyLogprobs(current=batch.old_logprobs, old=batch.old_logprobs, sampler=batch.sampler_logprobs)
    weights = subject.manager().one("importance_weights", logprobs=logprobs, batch=batch)
    per_row = isinstance(weights, Tensor) and weights.shape == batch.action_mask.shape[:1]
    return weights.unsqueeze(-1).expand(batch.action_mask.shape) if per_row else weights


@check("importance_weights")
def importance_weights_have_shape(subject: Subject) -> None:
    """``[B, T]`` or ``[B]``, finite everywhere (a NaN outside the mask spoils gradients) and never negative."""
    batch = _correction_batch(subject)
    weights = _weights(subject, batch)
    expect(is_finite(weights), "importance_weights are not finite everywhere, outside the mask included")
    expect(bool((weights >= 0).all()), "importance_weights are negative")


@check("importance_weights")
def importance_weights_are_row_wise(subject: Subject) -> None:
    """A row has the same weights alone as in the batch: micro-batches may be split anywhere."""
    batch = _correction_batch(subject)
    whole = _weights(subject, batch)
    for row, mask in enumerate(batch.action_mask):
        alone = _weights(subject, batch.select([row]))[0]
        same = close(whole[row][mask], alone[mask[: len(alone)]])
        expect(same, "importance_weights of a row depend on the other rows; statistics of the batch do not belong here")


@check("importance_weights")
def importance_weights_at_extreme_gaps(subject: Subject) -> None:
    """Finite and not negative where trainer and sampler are 50 nats apart, per token, either way."""
    batch = _correction_batch(subject)
    for gap in (50.0, -50.0):
        far = dataclasses.replace(batch, sampler_logprobs=batch.sampler_logprobs + gap * batch.action_mask)
        weights = _weights(subject, far)
        fine = is_finite(weights) and bool((weights >= 0).all())
        expect(fine, f"a gap of {gap:g} nats makes importance_weights that are not finite; clamp before exp")


@check("importance_weights")
def importance_weights_where_the_sampler_is_unknown(subject: Subject) -> None:
    """Finite where the sampler's log-probabilities are NaN, in a whole row and in parts of others."""
    batch = _correction_batch(subject)
    batch.sampler_logprobs = without_some(batch)
    expect(
        is_finite(_weights(subject, batch)),
        "importance_weights are not finite where the sampler is unknown; use batch.sampled_mask",
    )


@check("importance_weights")
def importance_weights_ignore_masked_garbage(subject: Subject) -> None:
    """NaN at padding and observations changes no weight and leaves none that is not finite."""
    batch = _correction_batch(subject)
    _expect_garbage_ignored(partial(_weights, subject), batch, "importance_weights")
    dirty = _weights(subject, widen(spoil(batch), 3, fill=float("nan")))
    expect(is_finite(dirty), "importance_weights: NaN outside the mask comes out again; it spoils gradients")


@check("draw_tasks")
def drawn_tasks_come_again(subject: Subject) -> None:
    """As many as asked for, numbers below the count of tasks or tasks; a fresh instance with the same state draws the same."""
    tasks = [Task(f"{number}+1=", str(number + 1), index=number) for number in range(7)]

    def draw(manager: PluginManager) -> list[Any]:
        return list(manager.one("draw_tasks", tasks=tasks, count=5, step=1))

    manager, fresh = subject.manager(), subject.manager()
    draw(manager)
    if {"state_dict", "load_state_dict"} <= subject.hooks:
        fresh.call(subject.key, "load_state_dict", state=copy.deepcopy(plain_state(manager.one("state_dict"), subject.key)))
    drawn = draw(manager)
    expect(len(drawn) == 5, f"draw_tasks gave {len(drawn)} tasks where 5 were asked for")
    for one in drawn:
        known = isinstance(one, Task) or (hasattr(one, "__index__") and 0 <= operator.index(one) < len(tasks))
        expect(known, f"draw_tasks gave {one!r}; give numbers below len(tasks), or tasks")
    expect(draw(fresh) == drawn, "another instance with the same state draws other tasks; keep dice and counts in state_dict")


@check("choose_role")
def chosen_roles_generate(subject: Subject) -> None:
    """``None``, or a role of its needs that generates; the same for the same episode and state."""
    roles = {need.name for need in subject.needs.roles if need.generates}
    task = Task("1+1=", "2")
    for role in sorted(roles):
        for sample in range(4):
            episode = Episode(f"made-up-{sample}", "made-up", task, sample=sample, seed=7)
            chosen, again = (subject.manager().one("choose_role", episode=episode, role=role) for _ in range(2))
            expect(chosen is None or chosen in roles, f"choose_role gave {chosen!r}; of needs, {sorted(roles)} generate")
            expect(chosen == again, f"choose_role gave {chosen!r}, then {again!r} for one episode; draw from episode.seed")


@check("prepare_batch")
def prepared_batches_are_plain(subject: Subject) -> None:
    """Tensors and numbers by name, or ``None``: they go to other processes."""
    batch = _batch(subject)
    batch.advantages = torch.where(batch.action_mask, noise(batch, 80), 0.0)
    for name, value in (subject.manager().one("prepare_batch", experience=batch) or {}).items():
        expect(isinstance(value, Tensor | float | int), f"prepare_batch gave a {type(value).__name__} as {name!r}")


@check("step_metrics")
def figures_of_a_step_are_metrics(subject: Subject) -> None:
    """Finite numbers as ``Metric``, or nothing; asked again at once, it does not fail."""
    manager = subject.manager()
    for step in (1, 2):
        for name, value in reduced(manager.call(subject.key, "step_metrics", step=step) or ()).items():
            expect(math.isfinite(value), f"step_metrics gave {name} as {value}; leave out what was not measured")


@check("step_finished")
def answers_to_a_step_are_known(subject: Subject) -> None:
    """``None``, ``Stop(reason)``, or ``Adjust`` of finite numbers."""
    answer = subject.manager().call(subject.key, "step_finished", step=1, metrics=dict(METRICS))
    known = answer is None or isinstance(answer, Stop | Adjust)
    expect(known, f"step_finished gave a {type(answer).__name__}; return Stop, Adjust or nothing")
    for name, value in answer.settings.items() if isinstance(answer, Adjust) else ():
        expect(math.isfinite(value), f"step_finished adjusts {name} to {value}")
