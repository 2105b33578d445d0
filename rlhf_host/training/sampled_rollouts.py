"""Where the steps of a run come from: here, tasks that the engines play; ``saved_rollouts`` is the other source."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from rlhf_host.data.stream import TaskStream
from rlhf_host.records.needs import ScoreContext
from rlhf_host.rollouts.collect import Collected, Collector


class Rollouts(Protocol):
    """What the online loop asks for its batches."""

    weights: dict[str, float]
    """Reward alias → weight."""

    @property
    def steps(self) -> int | None:
        """How many there are; ``None``: no end."""

    epoch: int
    """Passes over the data so far."""

    async def next_rollouts(self, context: ScoreContext) -> Collected:
        """The judged groups of ``context.step``."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values: where in the data the run is."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back, or on, to there."""


class SampledRollouts:
    """``groups`` groups per step, of tasks in the stream's order."""

    steps = None

    def __init__(self, stream: TaskStream, collector: Collector, groups: int):
        self.stream, self.collector, self.groups = stream, collector, groups
        self.weights = {alias: weight for alias, (_, weight) in collector.judges.items()}
        self.state_dict, self.load_state_dict = stream.state_dict, stream.load_state_dict

    async def next_rollouts(self, context: ScoreContext) -> Collected:
        collected = await self.collector.fill(partial(self.stream.draw, step=context.step), self.groups, context)
        self.epoch = self.stream.epoch
        return collected
