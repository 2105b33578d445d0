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
from rlhf_host.rollouts.pipeline import Pipeline
from rlhf_host.spans import span


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
    beside: Mapping[str, Experience] = field(default_factory=dict)
    """Alias of a plugin → its rows that train beside the batch."""


class Source(Protocol):
    """Source of the loop's batches."""

    @property
    def pipeline(self) -> Pipeline | None:
        """Rollouts whose draws may be open between steps, if there are such."""

    @property
    def steps(self) -> int | None:
        """Number of steps; None: no end."""

    def draw(self, step: int, version: int) -> Drawn:
        """Returns the batch of a step, ready for updates; ``version`` is that of the weights."""

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON values: the run's position in the data."""

    def load_state_dict(self, state: Mapping[str, Any], finished: Mapping[int, Played]) -> None:
        """Restores that position. ``finished``: as returned by ``Pipeline.finished``."""


@contextmanager
def timed(times: dict[str, float], phase: str) -> Iterator[None]:
    """Writes the seconds of the body, a span of the controller, into ``times``."""
    started = time.perf_counter()
    with span(phase):
        yield
    times[f"time/{phase}"] = time.perf_counter() - started
