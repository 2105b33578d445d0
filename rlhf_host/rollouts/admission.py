"""Rules of sampling ahead of training: which draws may begin, and which form the next batch. Only counters: no clock, no tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Admission:
    """Rules for draws, which are numbered in the order of the stream (``ordinal``). A batch is the next ``batch`` kept draws in
    this order, so it does not depend on which of them finish first.

    A batch has ``batch`` places, and there are ``depth + 1`` batches of them. A draw holds a place from its admission until the
    weights that its batch trains are *published* to the engines. A dropped draw gives its place to another one, as long as its
    batch may refill. So when a draw is admitted under version v, fewer than ``(depth + 1) · batch`` others before it hold
    places. Every version frees ``batch`` places, so the draw is trained from version ``v + depth`` at the latest. With depth 0
    this is the synchronous loop.
    """

    batch: int
    """Groups of a step."""
    depth: int
    """Maximum age of a batch, in weight versions."""
    steps: int
    """Number of versions of the whole run: nothing is admitted that could not be trained."""
    budget: int
    """Maximum number of draws per batch: so many make a batch even if fewer than ``batch`` are kept."""
    version: int = 0
    """Version of the engines."""
    admitted: int = 0
    """Next ordinal."""
    unsettled: int = 0
    """Ordinal whose verdict is next."""
    taken: int = 0
    """First ordinal that is in no batch."""
    passed: set[int] = field(default_factory=set)
    """Later ordinals that are in batches."""
    held: int = 0
    """Places in use."""
    filling: int = 0
    """Verdicts of the batch that is being filled."""
    _kept: int = 0
    _dropped: set[int] = field(default_factory=set)
    """Draws that gave their places away before their turn."""
    _complete: deque[int] = field(default_factory=deque)
    """Draws of each batch that is complete but not taken."""
    _training: bool = False

    @property
    def max_age(self) -> int:
        """Maximum age of a batch, in versions."""
        return self.depth

    @property
    def has_capacity(self) -> bool:
        """True if another draw may begin."""
        return self.held < (min(self.depth, self.steps - self.version - 1) + 1) * self.batch

    def begin_at(self, ordinal: int, passed: Collection[int] = ()) -> None:
        """Sets the ordinal to go on from."""
        self.admitted = self.unsettled = self.taken = ordinal
        self.passed = {*passed}

    def pass_over(self) -> bool:
        """Skips the next ordinal if a batch has it; returns True if so."""
        known = self.admitted in self.passed
        self.admitted += known
        return known

    def admit(self) -> int:
        """Returns the ordinal of a draw that begins."""
        self.held += 1
        self.admitted += 1
        return self.admitted - 1

    def verdict(self, ordinal: int, *, kept: bool) -> None:
        """Notes a verdict before its turn. The place of a dropped draw is free at once if its batch may refill in any case."""
        if not kept and ordinal + 1 - (self.unsettled - self.filling) <= self.budget - self.batch:
            self._dropped.add(ordinal)
            self.held -= 1

    def over(self, ordinal: int) -> None:
        """Notes that a draw is finished; it waits for its turn."""

    def surplus(self) -> range:
        """Returns draws to give back to the stream, as if they had never begun."""
        return range(0)

    def settle(self, *, kept: bool) -> None:
        """Notes the verdict of the draw ``unsettled``."""
        self.filling += 1
        self._kept += kept
        left, missing = self.budget - self.filling, self.batch - self._kept
        if self.unsettled in self._dropped:
            self._dropped.remove(self.unsettled)
        elif not kept and left >= missing:
            self.held -= 1
        self.unsettled += 1
        if not (left and missing):
            self._complete.append(self.filling)
            self.filling = self._kept = 0

    def take(self) -> Sequence[int] | None:
        """Returns the ordinals of the next batch, dropped ones included, in order; None: it is not complete yet."""
        if not self._complete:
            return None
        first = self.taken
        self.taken += self._complete.popleft()
        self._training = True
        return range(first, self.taken)

    def publish(self, version: int) -> None:
        """Notes that the engines have the weights that the last taken batch trained."""
        self.held -= self._training * self.batch
        self.version, self._training = version, False


@dataclass(slots=True)
class InAdvance(Admission):
    """Rules for ``depth`` 0: begins enough draws to get ``batch`` kept ones, judging by the share kept so far. Replacing
    dropped draws one by one would wait for one episode after the other. The batches are the same: draws beyond the last kept
    one of a batch are given back.
    """

    asked: int = 1
    """Verdicts of the run, plus one that is kept."""
    granted: int = 1
    """Kept verdicts of the run, plus one."""
    sure: int = 0
    """Kept draws of the batch that is being filled."""
    _known: set[int] = field(default_factory=set)
    """Draws of that batch that have a verdict."""

    @property
    def has_capacity(self) -> bool:
        begun = self.admitted - self.taken
        if self.version >= self.steps or self._training or self._complete or begun >= self.budget:
            return False
        return self.sure + (begun - len(self._known)) * self.granted / self.asked < self.batch

    def verdict(self, ordinal: int, *, kept: bool) -> None:
        if ordinal not in self._known:
            self._known.add(ordinal)
            self.asked += 1
            self.granted += kept
            self.sure += kept

    def settle(self, *, kept: bool) -> None:
        self.verdict(self.unsettled, kept=kept)
        Admission.settle(self, kept=kept)

    def surplus(self) -> range:
        if not self._complete:
            return range(0)
        given_back = range(self.unsettled, self.admitted)
        self.held -= len(given_back)
        self.admitted, self.sure = self.unsettled, 0
        self._known.clear()
        return given_back
