"""Made-up groups and batches for checks, turned into tensors by the host's own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.episodes import Group, Reward, Segment, Task, Trajectory
from rlhf_host.records.tensors import Advantages, Experience
from rlhf_host.rollouts.experience import apply_rewards, make_experience
from rlhf_host.testing.contracts.subject import Subject, expect

VOCABULARY = 16
WEIGHTS = {"first": 1.0, "second": 0.5}
MAX_NEW_TOKENS = 8
STEP = 1000
"""Late enough for schedules and warm-ups to be over."""


def make_groups(
    sizes: Sequence[int], *, turns: int = 1, rewards: Callable[[int, int], float] | None = None, seed: int = 0
) -> list[Group]:
    """One group per size, judged by two made-up reward plugins.

    Args:
        turns: up to so many action segments per trajectory, observations between them.
        rewards: ``(group, sample)`` → weighted total; default: random, and the plugins disagree.
        seed: of everything random.
    """
    return [_group(number, size, turns, rewards, seed) for number, size in enumerate(sizes)]


def _group(number: int, size: int, turns: int, rewards: Callable[[int, int], float] | None, seed: int) -> Group:
    random = torch.Generator().manual_seed(1000 * seed + number)

    def draw(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=random).tolist()

    task = Task("made up", "4", index=number, source="made_up", prompt_ids=tuple(draw(3 + number % 3)))
    group_id = f"made-up-{number}"
    rows = []
    for sample in range(size):
        segments = [Segment("prompt", list(task.prompt_ids or ()))]
        for turn in range(1 + (sample + number) % turns if turns > 1 else 1):
            if turn:
                segments.append(Segment("observation", draw(1 + (sample + turn) % 2)))
            length = 1 + (2 * sample + number + turn) % 5
            logprobs = (-torch.rand(length, generator=random) - 0.1).tolist()
            segments.append(Segment("action", draw(length), logprobs, [0] * length))
        own = torch.randn(2, generator=random).tolist()
        if rewards is not None:
            total = rewards(number, sample)
            own = [total / 2, total]
        count = sum(segment.kind == "action" for segment in segments)
        judged: dict[str, Reward | None] = {
            name: Reward(value, turns=[value / count] * count) for name, value in zip(WEIGHTS, own, strict=True)
        }
        total = sum(WEIGHTS[name] * value for name, value in zip(WEIGHTS, own, strict=True))
        rows.append(
            Trajectory(
                f"{group_id}-{sample}",
                group_id,
                task,
                segments,
                finish_reason="length" if sample == 1 else "stop",
                sample=sample,
                rewards=judged,
                reward=total,
                score=float(total > 0),
                decode=lambda ids: " ".join(map(str, ids)),
            )
        )
    return Group(group_id, task, rows)


def make_batch(subject: Subject, groups: Sequence[Group]) -> Experience:
    """The groups as an experience that also has what the plugin's ``needs().outputs`` asks for, at random per row."""
    batch = make_experience(groups, WEIGHTS, step=STEP, max_new_tokens=MAX_NEW_TOKENS, temperature=1.0)
    for salt, output in enumerate(output for output in subject.needs.outputs if output.role):
        role, what = output.role, output.what
        if what == "logprobs":
            batch.logprobs[role] = torch.where(batch.completion_mask, batch.sampler_logprobs + 0.1 * noise(batch, salt), 0.0)
        elif what == "values":
            batch.values[role] = noise(batch, salt)
        elif what == "bootstrap":
            batch.bootstrap[role] = noise(batch, salt)[:, 0].clone()
    return batch


def noise(batch: Experience, salt: int) -> Tensor:
    """``[B, T]`` standard normal on real tokens, 0 elsewhere: a row's own, wherever it stands and however wide the batch is."""
    values = torch.zeros(batch.completion_mask.shape)
    for row, trajectory in enumerate(batch.trajectories):
        random = torch.Generator().manual_seed(10_000 * trajectory.task.index + 100 * trajectory.sample + salt)
        length = int(batch.completion_mask[row].sum())
        values[row, :length] = torch.randn(length, generator=random)
    return values


def advantages_of(subject: Subject, batch: Experience, *, shaped: bool = True) -> Advantages:
    """What a fresh instance makes of the batch: transforms, shaping and masks, then advantages; ``batch`` keeps them all.

    Args:
        shaped: add a small random term to the shaped rewards, as a KL penalty would.
    """
    return advantages_by(subject.manager(), batch, shaped=shaped)


def advantages_by(manager: PluginManager, batch: Experience, *, shaped: bool = True) -> Advantages:
    """The same by a given manager."""
    extra = 0.01 * noise(batch, 99) if shaped else torch.zeros(batch.action_mask.shape)
    if batch.shaped is not None:
        extra = batch.shaped
    apply_rewards(batch, manager)
    batch.shaped = batch.shaped + torch.where(batch.action_mask, extra, 0.0)  # type: ignore[operator]
    found = manager.one("compute_advantages", experience=batch)
    expect(isinstance(found, Advantages), f"compute_advantages gave a {type(found).__name__}, not Advantages")
    for name, value in (("advantages", found.advantages), ("returns", found.returns)):
        if value is not None or name == "advantages":
            expect(isinstance(value, Tensor), f"{name} is a {type(value).__name__}, not a tensor")
            expected = list(batch.action_mask.shape)
            expect(list(value.shape) == expected, f"{name} has shape {list(value.shape)}, expected [B, T] = {expected}")
    batch.advantages, batch.returns = found.advantages, found.returns
    return found


def in_order(batch: Experience, rows: Sequence[int]) -> Experience:
    """A copy with the rows in that order, of the same width."""
    return batch.select(list(rows), trim=False)


def widen(batch: Experience, by: int, *, fill: float = 0.0) -> Experience:
    """A copy with ``by`` more columns of padding, float tensors filled with ``fill``."""
    shape = batch.completion_mask.shape

    def wider(name: str, value: Tensor) -> Tensor:
        if value.shape != shape:
            return value
        padding = fill if value.is_floating_point() else -1 if name == "turn_ids" else 0
        return torch.cat([value, torch.full((shape[0], by), padding, dtype=value.dtype)], dim=1)

    return batch.map(wider)


def spoil(batch: Experience) -> Experience:
    """A copy whose float tensors ``[B, T]`` are NaN at padding and observations."""
    mask = batch.action_mask

    def spoiled(_: str, value: Tensor) -> Tensor:
        return torch.where(mask, value, float("nan")) if value.shape == mask.shape and value.is_floating_point() else value

    return batch.map(spoiled)


def without_observations(batch: Experience) -> Experience:
    """A copy in which every row has only its action tokens, moved to the left."""
    order = torch.argsort((~batch.action_mask).to(torch.int8), dim=1, stable=True)
    kept = torch.gather(batch.action_mask, 1, order)

    def compact(name: str, value: Tensor) -> Tensor:
        if value.shape != kept.shape:
            return value
        empty = torch.tensor(-1 if name == "turn_ids" else 0, dtype=value.dtype)
        return torch.where(kept, torch.gather(value, 1, order), empty)

    found = batch.map(compact)
    found.completion_mask = kept
    return found


def close(a: Tensor, b: Tensor, *, exact: bool = False) -> bool:
    """Equal to rounding; NaN equals nothing."""
    return a.shape == b.shape and bool(torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-4, atol=1e-5))
