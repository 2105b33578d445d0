"""Sources of a run's rollouts: here, tasks that the engines play step by step. ``rollouts.pipeline`` is another, and saved
trajectories (package ``rlhf-samples``) are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from rlhf_host.data.stream import TaskStream
from rlhf_host.records.needs import ScoreContext
from rlhf_host.rollouts.collect import Collected, Collector, Played


class Rollouts(Protocol):
    """Source of the online loop's batches."""

    weights: dict[str, float]
    """Reward alias → weight."""

    @property
    def steps(self) -> int | None:
        """Number of steps; None: no end."""

    epoch: int
    """Passes over the data so far."""

    async def next_rollouts(self, context: ScoreContext) -> Collected:
        """Returns the judged groups of ``context.step``."""

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON values: the run's position in the data."""

    def load_state_dict(self, state: Mapping[str, Any], finished: Mapping[int, Played]) -> None:
        """Restores that position."""


class SampledRollouts:
    """``groups`` groups per step, of tasks in the stream's order."""

    steps = None

    def __init__(self, stream: TaskStream, collector: Collector, groups: int):
        self.stream, self.collector, self.groups = stream, collector, groups
        self.weights = {alias: weight for alias, (_, weight) in collector.judges.items()}
        self.drawn = 0

    async def next_rollouts(self, context: ScoreContext) -> Collected:
        draw = partial(self.stream.draw, step=context.step)
        collected = await self.collector.fill(draw, self.groups, context, self.drawn)
        self.epoch = self.stream.epoch
        self.drawn += len(collected.draws)
        return collected

    def state_dict(self) -> dict[str, Any]:
        return {**self.stream.state_dict(), "ordinal": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any], finished: Mapping[int, Played]) -> None:
        self.stream.load_state_dict(state)
        self.drawn = state["ordinal"]
