"""Sources of a run's rollouts: here, tasks that the engines play step by step. ``saved_rollouts`` and ``rollouts.pipeline`` are
the other sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from rlhf_host.data.stream import TaskStream
from rlhf_host.records.needs import ScoreContext
from rlhf_host.rollouts.collect import Collected, Collector, NoBatchError, Played


class Rollouts(Protocol):
    """Source of the online loop's batches."""

    weights: dict[str, float]
    """Reward alias → weight."""

    @property
    def steps(self) -> int | None:
        """Number of steps; None: no end."""

    epoch: int
    """Passes over the data so far."""
    max_age: int
    """Maximum age of trained tokens, in weight versions. 0: they were sampled by the current weights, or their age is unknown."""

    takes_finished: bool
    """True if it uses the finished groups of a checkpoint."""

    async def next_rollouts(self, context: ScoreContext) -> Collected:
        """Returns the judged groups of ``context.step``."""

    async def published(self, version: int) -> None:
        """Notes that the engines have the weights of ``version``."""

    async def wait_until_over(self) -> None:
        """Waits for everything that must finish before the weights change or an evaluation begins."""

    async def close(self) -> None:
        """Ends everything that was begun for later batches."""

    def finished(self) -> Mapping[int, Played]:
        """Returns finished groups that are in no batch, for checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON values: the run's position in the data."""

    def load_state_dict(self, state: Mapping[str, Any], finished: Mapping[int, Played]) -> None:
        """Restores that position."""


class SampledRollouts:
    """``groups`` groups per step, of tasks in the stream's order."""

    steps, max_age, takes_finished = None, 0, False

    def __init__(self, stream: TaskStream, collector: Collector, groups: int):
        self.stream, self.collector, self.groups = stream, collector, groups
        self.weights = {alias: weight for alias, (_, weight) in collector.judges.items()}
        self.drawn = 0

    async def next_rollouts(self, context: ScoreContext) -> Collected:
        try:
            collected = await self.collector.fill(partial(self.stream.draw, step=context.step), self.groups, context)
        except NoBatchError as error:
            error.draws = self._numbered(error.draws)
            raise
        self.epoch = self.stream.epoch
        collected.draws = self._numbered(collected.draws)
        self.drawn += len(collected.draws)
        return collected

    def _numbered(self, draws: Sequence[tuple[int, str, int, str]]) -> list[tuple[int, str, int, str]]:
        """Returns the draws with their numbers in the run."""
        return [(self.drawn + number, source, index, outcome) for number, source, index, outcome in draws]

    async def published(self, version: int) -> None:
        """Does nothing: no task is drawn before its step."""

    async def wait_until_over(self) -> None:
        """Returns at once: no request is open between two steps."""

    close = wait_until_over

    def finished(self) -> Mapping[int, Played]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {**self.stream.state_dict(), "ordinal": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any], finished: Mapping[int, Played]) -> None:
        self.stream.load_state_dict(state)
        self.drawn = state.get("ordinal", 0)
