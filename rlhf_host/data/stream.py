"""The order in which tasks are drawn: fixed by the seed, resumable to the task."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_host.errors import UserError
from rlhf_host.records.episodes import Task


@dataclass(slots=True)
class TaskSet:
    """The tasks of one split, with their prompts tokenised."""

    tasks: list[Task]
    weights: dict[str, float]
    """Source name → its share when several are mixed; only sources that have tasks."""
    report: list[str] = field(default_factory=list)
    """For people: what was read, filtered and truncated."""

    def __len__(self) -> int:
        return len(self.tasks)


class TaskStream:
    """Draws tasks without end.

    Within a source every task comes once per epoch, in an order made from (seed, source name, epoch), or in file order with
    ``shuffle=False``. Sources share the draws in proportion to their weights: the next draw goes to the source furthest behind
    its share (the divisor method of d'Hondt), so any stretch of the stream is mixed as the weights say and the order depends on
    nothing but the arguments. How often each source was drawn is the whole state.
    """

    def __init__(self, taskset: TaskSet, seed: int = 0, shuffle: bool = True):
        self._sources: dict[str, list[Task]] = {name: [] for name in taskset.weights}
        for task in taskset.tasks:
            self._sources[task.source].append(task)
        if not all(self._sources.values()) or not self._sources:
            raise UserError("there are no tasks to draw")
        self._weights = taskset.weights
        self._seed = seed
        self._shuffle = shuffle
        self._drawn = dict.fromkeys(self._sources, 0)
        self._orders: dict[str, tuple[int, list[int]]] = {}
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """Which pass over its source, from 0, the task drawn last belongs to."""
        return self._epoch

    @property
    def epochs(self) -> dict[str, float]:
        """Source name → passes over it so far."""
        return {name: count / len(self._sources[name]) for name, count in self._drawn.items()}

    def next(self) -> Task:
        """The next task."""
        source = min(self._sources, key=lambda name: (self._drawn[name] + 1) / self._weights[name])
        tasks = self._sources[source]
        self._epoch, position = divmod(self._drawn[source], len(tasks))
        self._drawn[source] += 1
        return tasks[self._order(source, self._epoch)[position]]

    def state_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        sizes = {name: len(tasks) for name, tasks in self._sources.items()}
        return {"seed": self._seed, "shuffle": self._shuffle, "epoch": self._epoch, "drawn": dict(self._drawn), "sizes": sizes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where ``state`` was taken, with its seed. Raises ``UserError`` when the data is not the same."""
        sizes = {name: len(tasks) for name, tasks in self._sources.items()}
        if dict(state["sizes"]) != sizes:
            then, now = (", ".join(f"{name} {size}" for name, size in each.items()) for each in (state["sizes"], sizes))
            raise UserError(
                f"the data changed since the checkpoint (tasks then: {then}; now: {now}): resume with the same data"
            )
        self._seed, self._shuffle = state["seed"], state["shuffle"]
        self._epoch = state["epoch"]
        self._drawn = {name: int(state["drawn"][name]) for name in sizes}
        self._orders.clear()

    def _order(self, source: str, epoch: int) -> list[int]:
        known = self._orders.get(source)
        if known is None or known[0] != epoch:
            order = list(range(len(self._sources[source])))
            if self._shuffle:
                # A string seed is hashed with SHA-512, so the order is the same in every process and Python.
                random.Random(f"{self._seed}/{source}/{epoch}").shuffle(order)
            known = self._orders[source] = (epoch, order)
        return known[1]
