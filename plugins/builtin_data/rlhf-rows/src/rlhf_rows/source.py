"""Batches of a data set: units are drawn in the stream's order and become rows, without sampling or scoring."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from rlhf_host import Experience, Group, Segment, Task, Trajectory, UserError
from rlhf_host.batches import Drawn
from rlhf_rows.units import Row, Unit, UnitSet

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Token ids → their text."""
Batch: TypeAlias = Callable[[Sequence[Group], int, int, dict[str, float]], Experience]
"""Groups, step, version of the weights → tensors; the seconds of each phase are written into the last."""


def group_of(unit: Unit, task: Task, epoch: int, decode: Decode) -> Group:
    """Returns a unit as a group of trajectories that share an episode."""
    name = f"{task.source}-{task.index}-{epoch}"
    return Group(name, task, trajectories(unit, task, name, decode))


def trajectories(unit: Unit, task: Task, name: str, decode: Decode) -> list[Trajectory]:
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
        stream: draws tasks of ``units.tasks()``.
        batch: makes tensors of groups.
        size: units per step.
        epochs: number of passes over the data; the last batch may be smaller. None: no end.
    """

    pipeline = None

    def __init__(self, units: UnitSet, stream: Any, batch: Batch, decode: Decode, *, size: int, epochs: float | None = None):
        self._units, self._stream, self._batch, self._decode, self._size = units, stream, batch, decode, size
        self._all = None if epochs is None else math.ceil(len(units) * epochs)

    @property
    def steps(self) -> int | None:
        """Number of steps in all epochs; None: no end."""
        return None if self._all is None else math.ceil(self._all / self._size)

    def draw(self, step: int, version: int) -> Drawn:
        times: dict[str, float] = {}
        groups = self.groups(step)
        experience = self._batch(groups, step, version, times)
        trained = experience.loss_mask.any(-1)  # other rows are there for statistics
        lengths = (experience.lengths[trained] if trained.any() else experience.lengths).double()
        metrics = {"units": float(len(groups)), "length/mean": float(lengths.mean()), "length/max": float(lengths.max())}
        return Drawn(experience, experience.trajectories, False, self._stream.epoch, metrics, times)

    def groups(self, step: int) -> list[Group]:
        """Returns the next units of the stream, for one step."""
        count = self._size if self._all is None else min(self._size, self._all - (step - 1) * self._size)
        draws, sources = self._stream.draw(count, step), self._units.sources
        return [group_of(sources[draw.task.source][draw.task.index], draw.task, draw.epoch, self._decode) for draw in draws]

    def state_dict(self) -> dict[str, Any]:
        return {**self._stream.state_dict(), "fingerprint": self._units.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any], finished: Mapping[int, Any]) -> None:
        """Restores the position. Raises ``UserError`` if the data has changed."""
        if state["fingerprint"] != self._units.fingerprint:
            raise UserError("the data, or its tokens, changed since the checkpoint: resume with what the run began with")
        self._stream.load_state_dict(state)
