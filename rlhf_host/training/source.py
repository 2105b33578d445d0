"""Sources of a run's batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhf_host.records.episodes import Trajectory
from rlhf_host.records.tensors import Experience
from rlhf_host.rollouts.collect import Played


@dataclass(slots=True)
class Drawn:
    """Data that a step trains on."""

    batch: Experience
    trajectories: Sequence[Trajectory]
    """For logs: the rows of the batch, and those that are not in it."""
    sampled: bool
    """True if the rows were sampled by the weights at the start of the step."""
    epoch: int = 0
    """Passes over the data so far."""
    metrics: dict[str, float] = field(default_factory=dict)
    row_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of agents, rewards and programs; their names are not the host's."""
    times: dict[str, float] = field(default_factory=dict)
    """Phase → seconds."""
    draws: Sequence[tuple[int, str, int, str]] = ()
    """Outcomes of draws, as in ``Collected``."""


class Source(Protocol):
    """Source of the loop's batches."""

    @property
    def steps(self) -> int | None:
        """Number of steps; None: no end."""

    def draw(self, step: int, version: int) -> Drawn:
        """Returns the batch of a step, ready for updates; ``version`` is that of the weights."""

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


@contextmanager
def timed(times: dict[str, float], phase: str) -> Iterator[None]:
    """Writes the seconds of the body into ``times``."""
    started = time.perf_counter()
    yield
    times[f"time/{phase}"] = time.perf_counter() - started
