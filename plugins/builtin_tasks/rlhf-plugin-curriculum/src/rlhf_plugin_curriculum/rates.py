"""The distinct tasks of one data source, how often each was solved, and the choice among them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from rlhf_host import Task

EASY, MEDIUM, HARD = range(3)
POOLS = ("easy", "medium", "hard")


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    strategy: Literal["adaptive", "pools"] = Field(
        "adaptive",
        description="adaptive: tasks by their learning value p(1 - p), p the success rate; pools: shares of easy, medium and hard",
    )
    by: Literal["score", "reward"] = Field(
        "score", description="what of an answer is its success: its 0-1 score, or its reward, which must then lie in [0, 1]"
    )
    memory: float = Field(
        0.5, ge=0, le=1, description="what a task's counts keep of the past at each new group; 1: nothing is forgotten"
    )
    uniform: float = Field(0.1, ge=0, le=1, description="adaptive: share of the draws that goes to all tasks alike")
    easy: float = Field(0.8, ge=0, le=1, description="tasks with a success rate at or above it are easy")
    hard: float = Field(0.2, ge=0, le=1, description="tasks with a success rate at or below it are hard")
    easy_share: float = Field(0.1, ge=0, le=1, description="pools: share of the draws that goes to easy tasks")
    hard_share: float = Field(0.1, ge=0, le=1, description="pools: share of the draws that goes to hard tasks")
    retire: float | None = Field(
        None, gt=0, le=1, description="mean success of a group from which its task counts as solved; default: no task retires"
    )
    retire_after: PositiveInt = Field(2, description="groups in a row that solve a task before it retires")

    @model_validator(mode="after")
    def _ordered(self) -> Options:
        if self.hard >= self.easy:
            raise ValueError(f"hard {self.hard:g} is not below easy {self.easy:g}")
        if self.easy_share + self.hard_share > 1:
            raise ValueError(f"easy_share {self.easy_share:g} and hard_share {self.hard_share:g} are more than all draws")
        return self

    @property
    def shares(self) -> tuple[float, float, float]:
        return self.easy_share, max(0.0, 1 - self.easy_share - self.hard_share), self.hard_share


def identity(task: Task) -> bytes:
    """Returns what rows of the same task have in common: prompt, label, agent, tools, pictures and values for the template."""
    parts = (task.prompt, task.ground_truth, task.agent, task.tools, dict(task.template_kwargs), task.images)
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=_text).encode()).digest()[:16]


def _text(value: Any) -> str:
    return value.key if hasattr(value, "key") else repr(value)


class Rates:
    """Success rates of one source's tasks.

    A task's counts are ``a``, right answers, and ``b``, wrong ones, where a group's score of 0.5 is half an answer of each. Older
    groups count less, ``a ← memory·a + Σ score``. Its rate is the mean of the posterior Beta(a + 1, b + 1).

    Args:
        tasks: those of the source, in order.
        begin: the number of the first among all tasks.
    """

    def __init__(self, tasks: Iterable[Task], begin: int, options: Options):
        self.options, self.begin = options, begin
        places: dict[bytes, list[int]] = {}
        for number, task in enumerate(tasks):
            places.setdefault(identity(task), []).append(number)
        self.rows = list(places.values())
        """Of each task, the rows that are it."""
        self.place = {key: place for place, key in enumerate(places)}
        count = len(self.rows)
        self.copies = np.array([len(rows) for rows in self.rows])
        self.draws, self.streak = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.a, self.b = np.zeros(count), np.zeros(count)
        self.seen, self.retired = np.zeros(count, bool), np.zeros(count, bool)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def over(self) -> bool:
        """True if all tasks are retired."""
        return bool(self.retired.all())

    @property
    def rates(self) -> NDArray[np.float64]:
        return (self.a + 1) / (self.a + self.b + 2)

    @property
    def values(self) -> NDArray[np.float64]:
        """Expected learning value of each task, ``E[p(1 − p)]`` of its posterior: the variance of a right answer, so what its
        group is expected to say. It is highest at a rate of a half, and lower the more is known of a rate that is far from it.
        """
        alpha, beta = self.a + 1, self.b + 1
        return alpha * beta / ((alpha + beta) * (alpha + beta + 1))

    @property
    def pools(self) -> NDArray[np.int64]:
        """The pool of each task. One that was not drawn yet has the rate 0.5, so it is medium."""
        easy, hard = self.rates >= self.options.easy, self.rates <= self.options.hard
        return np.where(easy, EASY, np.where(hard, HARD, MEDIUM))

    def note(self, task: Task, scores: Sequence[float]) -> None:
        """Counts a group's scores, one of each episode."""
        place, options = self.place[identity(task)], self.options
        right, wrong = sum(scores), len(scores) - sum(scores)
        self.a[place] = options.memory * self.a[place] + right
        self.b[place] = options.memory * self.b[place] + wrong
        self.seen[place] = True
        if options.retire is not None:
            solved = right / len(scores) >= options.retire - 1e-9
            self.streak[place] = self.streak[place] + 1 if solved else 0
            self.retired[place] |= self.streak[place] >= options.retire_after

    def draw(self, count: int, dice: np.random.Generator, shuffle: bool) -> list[int]:
        """Returns numbers of rows. No task comes twice while others that are not retired are left; retired ones come only if all
        are."""
        numbers: list[int] = []
        while len(numbers) < count:
            free = np.flatnonzero(~self.retired) if not self.over else np.arange(len(self))
            wanted = min(count - len(numbers), len(free))
            adaptive = self.options.strategy == "adaptive"
            for place in self._by_value(free, wanted, dice) if adaptive else self._by_pool(free, wanted, dice, shuffle):
                rows = self.rows[place]
                numbers.append(self.begin + rows[int(self.draws[place]) % len(rows)])
                self.draws[place] += 1
        return numbers

    def _by_value(self, free: NDArray[np.int64], count: int, dice: np.random.Generator) -> list[int]:
        """Draws without replacement, by exponential variables (Efraimidis and Spirakis, 2006)."""
        values = self.values[free] * self.copies[free]
        weights = (1 - self.options.uniform) * values / values.sum()
        weights += self.options.uniform * self.copies[free] / self.copies[free].sum()
        return _first(dice.exponential(size=len(free)) / weights, free, count)

    def _by_pool(self, free: NDArray[np.int64], count: int, dice: np.random.Generator, shuffle: bool) -> list[int]:
        """Draws from each pool the tasks that were drawn least often. A pool that is too small leaves its draws to the others."""
        pools = self.pools[free]
        sizes = np.bincount(pools, minlength=len(POOLS))
        wanted = np.zeros(len(POOLS), np.int64)
        while (missing := count - int(wanted.sum())) > 0:
            shares = np.where(wanted < sizes, self.options.shares, 0.0)
            if not shares.sum():
                shares = np.where(wanted < sizes, 1.0, 0.0)
            wanted = np.minimum(sizes, wanted + dice.multinomial(missing, shares / shares.sum()))
        ties = dice.random(len(free)) if shuffle else free / len(self)
        order = self.draws[free] // self.copies[free] + ties
        taken = [_first(order[pools == pool], free[pools == pool], int(wanted[pool])) for pool in (MEDIUM, EASY, HARD)]
        return [place for places in taken for place in places]

    def state_dict(self) -> dict[str, Any]:
        """Returns the tasks that were drawn, by their first row."""
        places = np.flatnonzero(self.draws)
        arrays = {name: getattr(self, name)[places].tolist() for name in ("a", "b", "draws", "streak", "seen", "retired")}
        rows = [self.rows[place] for place in places.tolist()]
        return {"count": len(self), "rows": [own[0] for own in rows], **arrays}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restores them; returns False if the tasks are others."""
        first = {rows[0]: place for place, rows in enumerate(self.rows)}
        places = [first.get(row) for row in state["rows"]]
        if state["count"] != len(self) or None in places:
            return False
        for name in ("a", "b", "draws", "streak", "seen", "retired"):
            getattr(self, name)[places] = state[name]
        return True


def _first(order: NDArray[np.float64], places: NDArray[np.int64], count: int) -> list[int]:
    """Returns the ``count`` places that are first in that order."""
    if count < len(order):
        least = np.argpartition(order, count)[:count]
        order, places = order[least], places[least]
    chosen: list[int] = places[np.argsort(order, kind="stable")].tolist()
    return chosen[:count]
