"""The order in which tasks are drawn: fixed by the seed, or chosen by a plugin; resumable to the exact task."""

from __future__ import annotations

import bisect
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

from rlhf_host.errors import RunError, UserError
from rlhf_host.records.episodes import Task


@dataclass(frozen=True, slots=True)
class Draw:
    """A task and its pass number: how often its source was completed before. No two draws of a task have the same number."""

    task: Task
    epoch: int


class IndexedTasks(Sequence[Any]):
    """Tasks that are made one by one, on demand.

    Args:
        fits: tasks for which it returns False are skipped when they are drawn.
    """

    def __init__(self, count: int, make: Callable[[int], Task], fits: Callable[[Task], bool] = lambda task: True):
        self._numbers, self._make, self.fits = range(count), make, fits

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        numbers = self._numbers[index]
        return self._make(numbers) if isinstance(numbers, int) else [self._make(number) for number in numbers]


class ReadTasks:
    """Tasks that are read one after the other as they are drawn, and again from the beginning after the last.

    Args:
        begin: returns the tasks from the beginning or, with ``keeps_place``, from where their source left off: after the number
            that it is given.
        fits: tasks for which it returns False are skipped.
    """

    def __init__(self, begin: Callable[[int], Iterable[Task]], fits: Callable[[Task], bool], *, keeps_place: bool):
        self._begin, self._fits, self.keeps_place = begin, fits, keeps_place
        self.go_to(0, 0)

    def go_to(self, passes: int, at: int) -> None:
        """Goes to the position after ``at`` tasks of the pass number ``passes``."""
        self.passes, self.at = passes, at
        self._tasks: Iterator[Task] | None = None

    def next(self) -> Task:
        for _ in range(2):
            if self._tasks is None:
                self._tasks = iter(self._begin(self.at if self.keeps_place else 0))
                for _ in islice(self._tasks, 0 if self.keeps_place else self.at):
                    pass
            for task in self._tasks:
                self.at += 1
                if self._fits(task):
                    return task
            self.go_to(self.passes + 1, 0)
        raise UserError("a task source has no tasks to draw, or only prompts that are too long")


Source: TypeAlias = Sequence[Task] | ReadTasks


@dataclass(slots=True)
class TaskSet:
    """The tasks of one split, with their prompts tokenised."""

    sources: dict[str, Source]
    weights: dict[str, float]
    """Source name → its share if several are mixed; only sources that have tasks."""
    report: list[str] = field(default_factory=list)
    """Summary for people: what was read, filtered and truncated."""

    @property
    def tasks(self) -> list[Task]:
        """All tasks that can be counted."""
        return [task for source in self.sources.values() if not isinstance(source, ReadTasks) for task in source]

    def __len__(self) -> int:
        return len(self.tasks)


Choose: TypeAlias = Callable[[Sequence[Task], int, int], Sequence[int | Task]]
"""``choose(tasks, count, step)``, like the hook ``draw_tasks``."""


class TaskStream:
    """Draws tasks without end.

    Within a source every task comes once per epoch, in an order made from (seed, source name, epoch). It is file order with
    ``shuffle=False``, and for a source that is read as it is drawn. Sources share the draws in proportion to their weights: the
    next draw goes to the source furthest behind its share (the divisor method of d'Hondt). So every stretch of the stream is
    mixed by weight, and the order depends only on the arguments. The whole state is the number of draws of each source.

    Args:
        choose: draws the tasks instead.
        chooser: the plugin of ``choose``.
    """

    def __init__(
        self, taskset: TaskSet, seed: int = 0, shuffle: bool = True, choose: Choose | None = None, chooser: str = "a plugin"
    ):
        self._sources = taskset.sources
        self._read = {name: source for name, source in self._sources.items() if isinstance(source, ReadTasks)}
        self._sizes = {name: len(source) for name, source in self._sources.items() if not isinstance(source, ReadTasks)}
        if not self._sources or not all(self._sizes.values()):
            raise UserError("there are no tasks to draw")
        self._weights, self._seed, self._shuffle = taskset.weights, seed, shuffle
        self._drawn = dict.fromkeys(self._sources, 0)
        self._chosen = 0
        self._orders: dict[str, tuple[int, list[int]]] = {}
        self._choose, self._chooser = choose, chooser
        self._all: Sequence[Task] = _joined(self._sources) if choose is not None else ()
        self.epoch = 0
        """Pass over its source, from 0, that the task drawn last belongs to."""

    @property
    def goes_back(self) -> bool:
        """True if it can draw again what it gave in this process."""
        return not any(source.keeps_place for source in self._read.values())

    def draw(self, count: int, step: int) -> list[Draw]:
        """Returns the next tasks.

        Raises:
            RunError: ``choose`` returned something other than ``count`` tasks or their numbers.
        """
        if self._choose is None:
            return [self._next() for _ in range(count)]
        chosen = list(islice(self._choose(self._all, count, step), count + 1))
        if len(chosen) != count:
            gave = len(chosen) if len(chosen) < count else f"more than {count}"
            raise RunError(f"{self._chooser} gave {gave} tasks from draw_tasks at step {step}, expected {count}")
        return [self._take(choice) for choice in chosen]

    def _take(self, choice: int | Task) -> Draw:
        below = len(self._all)
        self.epoch, self._chosen = self._chosen // below, self._chosen + 1
        if isinstance(choice, Task):
            return Draw(choice, self._chosen)
        if isinstance(choice, bool) or not hasattr(choice, "__index__") or not 0 <= operator.index(choice) < below:
            raise RunError(f"{self._chooser} gave {choice!r} from draw_tasks, expected a Task or a number below {below}")
        return Draw(self._all[operator.index(choice)], self._chosen)

    def _next(self) -> Draw:
        passed = 0
        while True:
            name = min(self._sources, key=lambda name: (self._drawn[name] + 1) / self._weights[name])
            source, drawn = self._sources[name], self._drawn[name]
            self._drawn[name] += 1
            if isinstance(source, ReadTasks):
                task, self.epoch = source.next(), source.passes
                return Draw(task, self.epoch)
            self.epoch, position = divmod(drawn, len(source))
            task = source[self._order(name, len(source), self.epoch)[position]]
            if not isinstance(source, IndexedTasks) or source.fits(task):
                return Draw(task, self.epoch)
            if (passed := passed + 1) > 2 * len(source):
                raise UserError(f"no prompt of {name} is short enough: raise data.max_prompt_tokens or truncate")

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values that JSON can hold."""
        order = {"seed": self._seed, "shuffle": self._shuffle, "epoch": self.epoch, "sizes": self._sizes}
        read = {name: [source.passes, source.at] for name, source in self._read.items()}
        return {**order, "drawn": dict(self._drawn), "chosen": self._chosen, "read": read}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on exactly where ``state`` was taken, with its seed. Raises ``UserError`` if the data has changed."""
        if dict(state["sizes"]) != self._sizes or state["read"].keys() != self._read.keys():
            then, now = (", ".join(f"{name} {size}" for name, size in each.items()) for each in (state["sizes"], self._sizes))
            raise UserError(
                f"the data changed since the checkpoint (tasks then: {then}; now: {now}): resume with the same data"
            )
        self._seed, self._shuffle = state["seed"], state["shuffle"]
        self.epoch, self._chosen = state["epoch"], state["chosen"]
        self._drawn = {name: int(state["drawn"][name]) for name in self._sources}
        for name, source in self._read.items():
            source.go_to(*state["read"][name])
        self._orders.clear()

    def _order(self, source: str, size: int, epoch: int) -> list[int]:
        known = self._orders.get(source)
        if known is None or known[0] != epoch:
            order = list(range(size))
            if self._shuffle:
                # A string seed is hashed with SHA-512, so the order is the same in every process and Python.
                random.Random(f"{self._seed}/{source}/{epoch}").shuffle(order)
            known = self._orders[source] = (epoch, order)
        return known[1]


def _joined(sources: Mapping[str, Source]) -> Sequence[Task]:
    """Returns several sources as one sequence, without those whose tasks have no numbers: a loader refuses them."""
    counted = [source for source in sources.values() if not isinstance(source, ReadTasks)]
    starts = [sum(map(len, counted[:number])) for number in range(len(counted))]

    def task(index: int) -> Task:
        number = bisect.bisect_right(starts, index) - 1
        return counted[number][index - starts[number]]

    return IndexedTasks(sum(map(len, counted)), task)
