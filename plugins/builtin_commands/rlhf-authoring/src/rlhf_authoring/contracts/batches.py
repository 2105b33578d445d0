"""Made-up groups and batches for checks, turned into tensors by the host's own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlhf_authoring.contracts.subject import Subject, expect
from rlhf_host import Advantages, Experience, Group, Reward, Segment, Task, Trajectory
from rlhf_host.internals import PluginManager, apply_rewards, make_experience

VOCABULARY = 16
WEIGHTS = {"first": 1.0, "second": 0.5}
MAX_NEW_TOKENS = 8
STEP = 1000
"""Late enough for schedules and warm-ups to be over."""


def make_groups(
    sizes: Sequence[int],
    *,
    turns: int = 1,
    rewards: Callable[[int, int], float] | None = None,
    length: Callable[[int, int, int], int] = lambda group, sample, turn: 1 + (2 * sample + group + turn) % 5,
    seed: int = 0,
) -> list[Group]:
    """One group per size, judged by two made-up reward plugins.

    Args:
        turns: up to so many action segments per trajectory, observations between them.
        rewards: ``(group, sample)`` → weighted total; default: random, and the plugins disagree.
        length: ``(group, sample, turn)`` → tokens of the action segment.
        seed: of everything random.
    """
    groups = []
    for number, size in enumerate(sizes):
        random = torch.Generator().manual_seed(1000 * seed + number)
        prompt = _tokens(3 + number % 3, random)
        task = Task("made up", "4", index=number, source="made_up", prompt_ids=tuple(prompt))
        group = Group(f"made-up-{number}", task, [])
        for sample in range(size):
            segments = [Segment("prompt", prompt)]
            count = 1 + (sample + number) % turns
            for turn in range(count):
                if turn:
                    segments.append(Segment("observation", _tokens(1 + (sample + turn) % 2, random)))
                tokens = _tokens(length(number, sample, turn), random)
                logprobs = (-torch.rand(len(tokens), generator=random) - 0.1).tolist()
                segments.append(Segment("action", tokens, logprobs, [0] * len(tokens)))
            if rewards is None:
                values = torch.randn(2, generator=random).tolist()
            else:
                values = [rewards(number, sample) / 2, rewards(number, sample)]
            total = sum(weight * value for weight, value in zip(WEIGHTS.values(), values, strict=True))
            row = Trajectory(
                f"{group.group_id}-{sample}",
                group.group_id,
                task,
                segments,
                finish_reason="length" if sample == 1 else "stop",
                sample=sample,
                rewards={name: Reward(one, turns=[one / count] * count) for name, one in zip(WEIGHTS, values, strict=True)},
                reward=total,
                score=float(total > 0),
                decode=lambda ids: " ".join(map(str, ids)),
            )
            group.trajectories.append(row)
        groups.append(group)
    return groups


def _tokens(count: int, random: torch.Generator) -> list[int]:
    return torch.randint(3, VOCABULARY, (count,), generator=random).tolist()


def make_batch(subject: Subject, groups: Sequence[Group]) -> Experience:
    """The groups as an experience that also has what the plugin's ``needs().outputs`` asks for, at random per row."""
    batch = make_experience(groups, WEIGHTS, step=STEP, max_new_tokens=MAX_NEW_TOKENS, temperature=1.0)
    if "rewrite_prompts" in subject.hooks:  # every row but each group's first
        longer = [[3, *row.prompt_ids] if row.sample else row.prompt_ids for row in batch.trajectories]
        batch.prompts = {need.name: longer for need in subject.needs.roles if not need.trainable}
    for salt, output in enumerate(output for output in subject.needs.outputs if output.role):
        role, what = output.role, output.what
        if what == "logprobs":
            near = batch.sampler_logprobs.nan_to_num(-0.6)  # rows of another model have none
            batch.logprobs[role] = torch.where(batch.completion_mask, near + 0.1 * noise(batch, salt), 0.0)
        elif what == "values":
            batch.values[role] = noise(batch, salt)
        elif what == "entropy":
            batch.entropy[role] = noise(batch, salt).abs()
        elif what == "collision":
            batch.collision[role] = noise(batch, salt).sigmoid()
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


def without_some(batch: Experience) -> Tensor:
    """Returns log-probabilities of the sampler that are unknown in the first row, and in every second place of the others."""
    unknown = torch.arange(batch.action_mask.shape[1]) % 2 == 0
    unknown = unknown | (torch.arange(len(batch)) == 0).unsqueeze(-1)
    return batch.sampler_logprobs.masked_fill(batch.action_mask & unknown, float("nan"))


def advantages_of(manager: PluginManager, batch: Experience, *, shaped: bool = True) -> Advantages:
    """Returns what the plugin makes of the batch: transforms, shaping and masks, then advantages; ``batch`` keeps them all.

    Args:
        shaped: add a small random term to the shaped rewards, as a KL penalty would.
    """
    extra = batch.shaped
    if extra is None:
        extra = 0.01 * noise(batch, 99) if shaped else torch.zeros(batch.action_mask.shape)
    apply_rewards(batch, manager)
    assert batch.shaped is not None
    batch.shaped = batch.shaped + torch.where(batch.action_mask, extra, 0.0)
    answer = manager.one("compute_advantages", experience=batch)
    expect(isinstance(answer, Advantages), f"compute_advantages gave a {type(answer).__name__}, not Advantages")
    batch.advantages, batch.returns = answer.advantages, answer.returns
    expected = list(batch.action_mask.shape)
    for name, value in (("advantages", batch.advantages), ("returns", batch.returns)):
        if value is not None or name == "advantages":
            expect(isinstance(value, Tensor), f"{name} is a {type(value).__name__}, not a tensor")
            expect(list(value.shape) == expected, f"{name} has shape {list(value.shape)}, expected [B, T] = {expected}")
    return answer


def in_order(batch: Experience, rows: Sequence[int]) -> Experience:
    """A copy with the rows in that order, of the same width."""
    return batch.select(list(rows), trim=False)


def apart(count: int) -> list[int]:
    """Rows backwards, and none beside its neighbour."""
    return [*range(count - 1, -1, -2), *range(count - 2, -1, -2)]


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
    mask = torch.gather(batch.action_mask, 1, order)

    def compact(name: str, value: Tensor) -> Tensor:
        if value.shape != mask.shape:
            return value
        empty = torch.tensor(-1 if name == "turn_ids" else 0, dtype=value.dtype)
        return torch.where(mask, torch.gather(value, 1, order), empty)

    short = batch.map(compact)
    short.completion_mask = mask
    return short


def close(a: Tensor, b: Tensor) -> bool:
    """Equal to rounding; NaN equals nothing."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def is_finite(values: Tensor, mask: Tensor | None = None) -> bool:
    """Everywhere, or where ``mask`` is true."""
    return bool(torch.isfinite(values if mask is None else values[mask]).all())
