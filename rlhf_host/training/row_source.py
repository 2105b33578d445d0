"""Batches of a data set: units are drawn in the stream's order and become rows, without sampling or scoring."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_host.data.stream import Draw, TaskStream
from rlhf_host.data.units import Row, Unit, UnitSet
from rlhf_host.errors import UserError
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.protocols import Trainer
from rlhf_host.records.episodes import Group, Segment, Task, Trajectory
from rlhf_host.records.needs import Needs
from rlhf_host.records.tensors import Experience
from rlhf_host.rollouts.collect import Played
from rlhf_host.rollouts.experience import apply_masks, make_experience
from rlhf_host.training.kept_logprobs import KeptLogprobs
from rlhf_host.training.made_rows import made_rows
from rlhf_host.training.rollout_source import add_extra, add_outputs
from rlhf_host.training.saved_rows import decoder
from rlhf_host.training.source import Drawn, timed


@dataclass(slots=True)
class RowBatches:
    """Turns units into batches, for training and evaluation."""

    manager: PluginManager
    needs: Needs
    trainer: Trainer | None
    """None if only ``rows`` are needed."""
    temperature: float
    tokenizer: Any
    kept: Mapping[str, KeptLogprobs] = field(default_factory=dict)
    """Role → its log-probabilities, if they were computed before the run."""

    def batch(self, groups: Sequence[Group], step: int, version: int, times: dict[str, float]) -> Experience:
        """Returns the groups as tensors, with the log-probabilities of other roles and prepared values of plugins."""
        assert self.trainer is not None
        with timed(times, "rows"):
            experience = self.rows(groups, step, version)
        with timed(times, "logprobs"):
            experience.logprobs = {role: kept.of(experience) for role, kept in self.kept.items()}
            add_outputs(experience, self.trainer, self.needs, "fused")
            add_extra(experience, self.manager, self.trainer, self.needs)
        return experience

    def rows(self, groups: Sequence[Group], step: int, version: int) -> Experience:
        """Returns the groups, or the rows that a plugin makes from them, as tensors."""
        if self.manager.has("make_rows"):
            groups = made_rows(groups, self.manager)
        experience = make_experience(groups, {}, step=step, max_new_tokens=0, temperature=self.temperature, version=version)
        apply_masks(experience, self.manager)
        return experience

    def group(self, unit: Unit, task: Task, epoch: int) -> Group:
        """Returns a unit as a group of trajectories that share an episode."""
        name = f"{task.source}-{task.index}-{epoch}"
        return Group(name, task, trajectories(unit, task, name, decoder(self.tokenizer)))


def trajectories(unit: Unit, task: Task, name: str, decode: Callable[[Sequence[int]], str]) -> list[Trajectory]:
    """Returns the rows of a unit, which share the episode and the group ``name``."""
    return [
        Trajectory(
            episode_id=name,
            group_id=name,
            task=task,
            segments=list(_segments(row)),
            sample=number,
            row=number,
            columns=row.columns,
            decode=decode,
        )
        for number, row in enumerate(unit.rows)
    ]


def _segments(row: Row) -> Iterator[Segment]:
    yield Segment("prompt", row.prompt_ids, images=row.images)

    def part(kind: Any, begin: int, end: int) -> Segment:
        columns = {name: values[begin:end] for name, values in row.token_columns.items()}
        return Segment(kind, row.completion_ids[begin:end], columns=columns)

    place = 0
    for begin, end in row.trained:
        if begin > place:
            yield part("observation", place, begin)
        yield part("action", begin, end)
        place = end
    if place < len(row.completion_ids):
        yield part("observation", place, len(row.completion_ids))


class RowSource:
    """A ``Source`` over a data set.

    Args:
        size: units per step.
        epochs: number of passes over the data; the last batch may be smaller. None: no end.
    """

    pipeline = None

    def __init__(self, units: UnitSet, stream: TaskStream, batches: RowBatches, *, size: int, epochs: float | None = None):
        self._units, self._stream, self._batches, self._size = units, stream, batches, size
        self._all = None if epochs is None else math.ceil(len(units) * epochs)

    @property
    def steps(self) -> int | None:
        """Number of steps in all epochs; None: no end."""
        return None if self._all is None else math.ceil(self._all / self._size)

    def draw(self, step: int, version: int) -> Drawn:
        times: dict[str, float] = {}
        groups = self.groups(step)
        experience = self._batches.batch(groups, step, version, times)
        trained = experience.loss_mask.any(-1)  # other rows are there for statistics
        lengths = (experience.lengths[trained] if trained.any() else experience.lengths).double()
        metrics = {"units": float(len(groups)), "length/mean": float(lengths.mean()), "length/max": float(lengths.max())}
        return Drawn(experience, experience.trajectories, False, self._stream.epoch, metrics, times)

    def groups(self, step: int) -> list[Group]:
        """Returns the next units of the stream, for one step."""
        count = self._size if self._all is None else min(self._size, self._all - (step - 1) * self._size)
        return [self._group(draw) for draw in self._stream.draw(count, step)]

    def _group(self, draw: Draw) -> Group:
        task = draw.task
        return self._batches.group(self._units.sources[task.source][task.index], task, draw.epoch)

    def state_dict(self) -> dict[str, Any]:
        return {**self._stream.state_dict(), "fingerprint": self._units.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any], finished: Mapping[int, Played]) -> None:
        """Restores the position. Raises ``UserError`` if the data has changed."""
        if state["fingerprint"] != self._units.fingerprint:
            raise UserError("the data, or its tokens, changed since the checkpoint: resume with what the run began with")
        self._stream.load_state_dict(state)
