"""Optimizer updates on the batch of one step: passes over it, minibatches, and the treatment of non-finite updates."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from rlhf_host.config.schema import RunConfig
from rlhf_host.errors import RunError
from rlhf_host.protocols import Trainer, Update
from rlhf_host.records.tensors import Experience
from rlhf_host.training.auxiliary_rows import joined
from rlhf_host.training.measures import speed
from rlhf_host.training.records import provenance
from rlhf_host.training.reduction import Metrics
from rlhf_host.training.saved_rows import lines, write_lines


def optimize(
    trainer: Trainer,
    experience: Experience,
    step: int,
    *,
    sampled: bool,
    config: RunConfig,
    roles: Sequence[str],
    run_dir: Path,
    beside: Mapping[str, Experience] | None = None,
) -> dict[str, float]:
    """Makes ``train.epochs × train.minibatches`` updates and returns their metrics.

    Args:
        sampled: the rows were sampled by the current weights.
        roles: the roles that this step trains.
        run_dir: directory for rows whose update is not finite.
        beside: rows of plugins that train with it, by their aliases, dealt out over the updates.

    Raises:
        RunError: a loss or gradient is not finite, unless ``train.on_nonfinite`` is ``skip``; or no plugin gave a loss.
    """
    train, metrics, started = config.train, Metrics(), time.perf_counter()
    made: list[Update] = []
    for epoch in range(train.epochs):
        for batch in _updates(experience, beside or {}, train.minibatches, [config.seed, step, epoch]):
            update = trainer.update(batch, sampled_now=sampled and not made)
            made.append(update)
            if update.refused is None:
                metrics.merge(update.metrics)
                continue
            dump = run_dir / "nonfinite" / f"step-{step:06d}.jsonl"
            origin = provenance(config.model_dump(mode="json"), "train")
            write_lines(dump, [lines(step, "train", batch.trajectories, origin, dump.parent)])
            if train.on_nonfinite == "stop":
                raise RunError(
                    f"step {step}: {update.refused}; after {len(made) - 1} updates in this step, its trajectories are in {dump}"
                )
    skipped = sum(update.refused is not None for update in made)
    result = metrics.result() | speed(made, time.perf_counter() - started)
    if not experience.loss_mask.any():  # masks of plugins left nothing of the batch
        result = {f"{role}/grad_norm".removeprefix("actor/"): 0.0 for role in roles} | result
    elif len(made) > skipped and roles and not any(f"{role}/loss".removeprefix("actor/") in result for role in roles):
        raise RunError(
            f"step {step}: no plugin gave a loss term, so nothing was trained: compute_loss must return or yield one"
            f" for {' or '.join(roles)}"
        )
    return result | ({"train/skipped": float(skipped)} if train.on_nonfinite == "skip" else {})


def _updates(experience: Experience, beside: Mapping[str, Experience], count: int, seed: Sequence[int]) -> Iterator[Experience]:
    """Yields the rows of each update: minibatches of the batch, and as many of the rows beside it."""
    batches = list(_minibatches(experience, count, seed))  # fewer than count if filters left the batch short
    others = {alias: list(_minibatches(rows, len(batches), seed)) for alias, rows in beside.items()}
    for number, batch in enumerate(batches):
        for alias, parts in others.items():
            if number < len(parts):
                batch = joined(batch, parts[number], alias)
        yield batch


def _minibatches(experience: Experience, count: int, seed: Sequence[int]) -> Iterator[Experience]:
    """Yields the rows of each update: groups, shuffled and dealt out evenly."""
    if count == 1:
        yield experience
        return
    order = np.random.default_rng(seed).permutation(int(experience.group_id.max()) + 1)
    parts = [set(part.tolist()) for part in np.array_split(order, count)]
    groups = experience.group_id.tolist()
    for part in filter(None, parts):
        yield experience.select([row for row, group in enumerate(groups) if group in part])
