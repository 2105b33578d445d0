"""Where the steps of a run come from: here, tasks that the engines play step by step; ``saved_rollouts`` and
``rollouts.pipeline`` are the other sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from rlhf_host.data.stream import TaskStream
from rlhf_host.records.needs import ScoreContext
from rlhf_host.rollouts.collect import Collected, Collector, NoBatchError, Played


class Rollouts(Protocol):
    """What the online loop asks for its batches."""

    weights: dict[str, float]
    """Reward alias → weight."""

    @property
    def steps(self) -> int | None:
        """How many there are; ``None``: no end."""

    epoch: int
    """Passes over the data so far."""
    max_age: int
    """By how many versions tokens may be older than the weights that they train; 0: they are of the same, or nobody knows."""

    takes_finished: bool
    """Whether it uses the finished groups of a checkpoint."""

    async def next_rollouts(self, context: ScoreContext) -> Collected:
        """The judged groups of ``context.step``."""

    async def published(self, version: int) -> None:
        """The engines have the weights of ``version``."""

    async def wait_until_over(self) -> None:
        """Wait until what must be over before the weights change, or an evaluation begins, is over."""

    async def close(self) -> None:
        """End what was begun beyond the last batch."""

    def finished(self) -> Mapping[int, Played]:
        """What is over and in no batch, for checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values: where in the data the run is."""

    def load_state_dict(self, state: Mapping[str, Any], finished: Mapping[int, Played]) -> None:
        """Go back, or on, to there."""


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
        """With their numbers in the run."""
        return [(self.drawn + number, source, index, outcome) for number, source, index, outcome in draws]

    async def published(self, version: int) -> None:
        """Nothing is drawn before its step."""

    async def wait_until_over(self) -> None:
        """Nothing is open between two steps."""

    close = wait_until_over

    def finished(self) -> Mapping[int, Played]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {**self.stream.state_dict(), "ordinal": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any], finished: Mapping[int, Played]) -> None:
        self.stream.load_state_dict(state)
        self.drawn = state.get("ordinal", 0)
