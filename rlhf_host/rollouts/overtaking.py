"""Batches of the oldest finished draws: later draws may pass slow ones, each of which has a deadline."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from rlhf_host.rollouts.admission import Admission

NONE = -1
"""Ordinal for "no draw has its turn"."""


@dataclass(slots=True)
class Overtaking(Admission):
    """A batch may skip up to ``batch`` unfinished draws; others get their places meanwhile, so that sampling goes on. It waits
    for a draw that would otherwise be trained from a version more than ``max_staleness`` after its own.

    When a draw is admitted under version v, fewer than ``(depth + 1) · batch`` others before it hold places, and ``batch`` were
    skipped. So once it is finished, it is trained from version ``v + depth + 1`` at the latest. Draws that a batch waits for
    were skipped before, so they fit into one batch.
    """

    max_staleness: int = 1
    """Maximum age of a batch, in weight versions; more than ``depth``."""
    _places: dict[int, int] = field(default_factory=dict)
    """Version of each draw that has a place and is in no batch, by ordinal."""
    _fit: set[int] = field(default_factory=set)
    """Draws with a place that are settled."""
    _gone: list[int] = field(default_factory=list)
    """Dropped draws for the next batch, without a place."""
    _over: deque[int] = field(default_factory=deque)
    _newest: int = -1
    """Last ordinal of a batch."""
    _older: int = 0
    """Places before it."""

    def __post_init__(self) -> None:
        self.unsettled = NONE

    @property
    def max_age(self) -> int:
        return self.max_staleness

    def begin_at(self, ordinal: int, passed: Collection[int] = ()) -> None:
        Admission.begin_at(self, ordinal, passed)
        self.unsettled = NONE

    @property
    def has_capacity(self) -> bool:
        left = self.steps - self.version
        return self.held < min((min(self.depth, left - 1) + 1) * self.batch + min(self._older, self.batch), left * self.batch)

    def admit(self) -> int:
        ordinal = Admission.admit(self)
        self._places[ordinal] = self.version
        return ordinal

    def verdict(self, ordinal: int, *, kept: bool) -> None:
        """Does nothing before a draw's turn, which comes at once."""

    def over(self, ordinal: int) -> None:
        self._over.append(ordinal)
        self.unsettled = self._over[0]

    def settle(self, *, kept: bool) -> None:
        ordinal, held = self._over.popleft(), self.held
        Admission.settle(self, kept=kept)
        self._complete.clear()
        self.unsettled = self._over[0] if self._over else NONE
        if self.held == held:
            self._fit.add(ordinal)
        else:
            del self._places[ordinal]
            self._older -= ordinal < self._newest
            self._gone.append(ordinal)

    def take(self) -> list[int] | None:
        if len(self._fit) < self.batch:
            return None
        chosen: list[int] = []
        passed = 0
        for ordinal, version in self._places.items():
            if ordinal in self._fit:
                chosen.append(ordinal)
                if len(chosen) == self.batch:
                    break
            elif passed == self.batch or version + self.max_staleness <= self.version:
                return None
            else:
                passed += 1
        for ordinal in chosen:
            del self._places[ordinal]
        self._fit -= {*chosen}
        taken, self._gone = sorted([*chosen, *self._gone]), []
        self._newest = max(self._newest, chosen[-1])
        self._older = sum(1 for _ in itertools.takewhile(self._newest.__gt__, self._places))
        self.passed.update(taken)
        while self.taken in self.passed:
            self.passed.remove(self.taken)
            self.taken += 1
        self._training = True
        return taken
