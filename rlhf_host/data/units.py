"""Units of a data set as tokens: a row, or a pair of rows, that a run without sampling draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_host.data.stream import IndexedTasks, TaskSet
from rlhf_host.records.episodes import Task


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and one completion."""

    prompt_ids: Sequence[int]
    """At least one token."""
    completion_ids: Sequence[int]
    trained: Sequence[tuple[int, int]]
    """Begin and end, in the completion, of the spans that are trained: ascending, apart from each other, not empty."""
    columns: Mapping[str, float] = field(default_factory=dict)
    """``label``, ``margin``, ..."""
    token_columns: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Per completion token."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What is drawn as one and stays together: a row, or the chosen and the rejected row of a pair, in this order."""

    rows: tuple[Row, ...]


@dataclass(slots=True)
class UnitSet:
    """The units of one split."""

    sources: dict[str, Sequence[Unit]]
    weights: dict[str, float]
    """Source name → its share when several are mixed; only sources that have units."""
    fingerprint: str
    """Of all tokens and numbers, in order: another one means other data."""
    report: list[str] = field(default_factory=list)
    """For people: what was read, left out and cut."""

    def __len__(self) -> int:
        return sum(map(len, self.sources.values()))

    def tasks(self) -> TaskSet:
        """The units as what ``TaskStream`` draws; a task's source and index say which unit it is."""

        def of(name: str, units: Sequence[Unit]) -> IndexedTasks:
            def make(index: int) -> Task:
                return Task("", index=index, source=name, prompt_ids=tuple(units[index].rows[0].prompt_ids))

            return IndexedTasks(len(units), make)

        return TaskSet({name: of(name, units) for name, units in self.sources.items()}, self.weights, self.report)
