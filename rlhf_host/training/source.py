"""Where the batches of a run come from."""

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
    """What a step trains on."""

    batch: Experience
    trajectories: Sequence[Trajectory]
    """For logs: the rows of the batch, and those that are not in it."""
    sampled: bool
    """The rows were sampled by the weights that the step begins with."""
    epoch: int = 0
    """Passes over the data so far."""
    metrics: dict[str, float] = field(default_factory=dict)
    row_metrics: Mapping[str, float] = field(default_factory=dict)
    """What agents, rewards and programs measured: their names are not the host's."""
    times: dict[str, float] = field(default_factory=dict)
    """Phase → seconds."""
    draws: Sequence[tuple[int, str, int, str]] = ()
    """As in ``Collected``."""


class Source(Protocol):
    """What the loop asks for its batches."""

    @property
    def steps(self) -> int | None:
        """How many there are; ``None``: no end."""

    def draw(self, step: int, version: int) -> Drawn:
        """The batch of a step, ready for updates; ``version`` is that of the weights."""

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


@contextmanager
def timed(times: dict[str, float], phase: str) -> Iterator[None]:
    """Write the seconds of the body into ``times``."""
    started = time.perf_counter()
    yield
    times[f"time/{phase}"] = time.perf_counter() - started
