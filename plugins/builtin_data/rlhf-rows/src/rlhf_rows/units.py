"""Units of a data set as tokens: a row, or a pair of rows, that a run without sampling draws."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from rlhf_host import Picture, Task
from rlhf_host.batches import IndexedTasks, TaskSet
from rlhf_rows.texts import task_of

PythonRows: TypeAlias = Mapping[str, Iterable[Mapping[str, Any]]]
"""A source's path, ``python:NAME`` → its rows."""
Split: TypeAlias = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and one completion."""

    prompt_ids: Sequence[int]
    """At least one token."""
    completion_ids: Sequence[int]
    trained: Sequence[tuple[int, int]]
    """Begin and end, in the completion, of the spans that are trained: ascending, apart from each other, not empty."""
    columns: Mapping[str, float] = field(default_factory=dict)
    """Columns such as ``label`` and ``margin``."""
    token_columns: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Columns with one value per completion token."""
    images: Sequence[Picture] = ()
    """The pictures that some of its tokens stand for, in order."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that are drawn as one and stay together: a row, or the chosen and the rejected row of a pair, in this order, and a gold
    row after them in a triple.
    """

    rows: tuple[Row, ...]
    text: str = ""
    """The example as JSON (``texts.py``), if the run needs it (``AlgoNeeds.texts``)."""

    def task(self, index: int, source: str) -> Task:
        """Returns what stands for the unit where tasks are drawn: with its text, if that is there."""
        return task_of(self.text, index, source, tuple(self.rows[0].prompt_ids))


@dataclass(slots=True)
class UnitSet:
    """The units of one split."""

    sources: dict[str, Sequence[Unit]]
    weights: dict[str, float]
    """Source name → its share if several are mixed; only sources that have units."""
    fingerprint: str
    """Fingerprint of all tokens and numbers, in order; another one means that the data has changed."""
    report: list[str] = field(default_factory=list)
    """Summary for people: what was read, left out and cut."""

    def __len__(self) -> int:
        return sum(map(len, self.sources.values()))

    def tasks(self) -> TaskSet:
        """Returns the units in the form that ``TaskStream`` draws; a task's source and index identify its unit."""

        def of(name: str, units: Sequence[Unit]) -> IndexedTasks:
            return IndexedTasks(len(units), lambda index: units[index].task(index, name))

        return TaskSet({name: of(name, units) for name, units in self.sources.items()}, self.weights, self.report)
