"""How far sampling runs ahead of training: which draws may begin, and which make the next batch. Counts, no clock, no tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Admission:
    """Draws are numbered in the order of the stream (``ordinal``). A batch is the next ``batch`` kept ones in this order, so it
    does not depend on which of them were over first.

    A batch has ``batch`` places, and there are ``depth + 1`` batches of them. A draw has a place from its admission until the
    weights that its batch trains are *published* to the engines; a dropped one gives it to another draw, as long as its batch may
    refill. So before a draw that is admitted under version v there are less than ``(depth + 1) · batch`` others with places, every
    version frees ``batch``, and the draw is trained from version ``v + depth`` at the latest. With depth 0 this is the synchronous
    loop.
    """

    batch: int
    """Groups of a step."""
    depth: int
    """By how many versions a batch may be older than the weights that it trains."""
    steps: int
    """Versions of the whole run: nothing is admitted that could not be trained."""
    budget: int
    """So many draws make a batch even if fewer than ``batch`` are kept."""
    version: int = 0
    """Of the engines."""
    admitted: int = 0
    """The next ordinal."""
    unsettled: int = 0
    """The ordinal whose verdict is next."""
    taken: int = 0
    """The first ordinal that no batch has."""
    passed: set[int] = field(default_factory=set)
    """Later ones that batches have."""
    held: int = 0
    """Places."""
    filling: int = 0
    """Verdicts of the batch that is filled."""
    _kept: int = 0
    _dropped: set[int] = field(default_factory=set)
    """Draws that gave their places away before their turn."""
    _complete: deque[int] = field(default_factory=deque)
    """Draws of each batch that is complete and not taken."""
    _training: bool = False

    @property
    def max_age(self) -> int:
        """Of a batch, in versions."""
        return self.depth

    @property
    def room(self) -> bool:
        """Whether another draw may begin."""
        return self.held < (min(self.depth, self.steps - self.version - 1) + 1) * self.batch

    def begin_at(self, ordinal: int, passed: Collection[int] = ()) -> None:
        """Go on from there."""
        self.admitted = self.unsettled = self.taken = ordinal
        self.passed = {*passed}

    def pass_over(self) -> bool:
        """Leave out the next ordinal if a batch has it; whether it was."""
        known = self.admitted in self.passed
        self.admitted += known
        return known

    def admit(self) -> int:
        """The ordinal of a draw that begins."""
        self.held += 1
        self.admitted += 1
        return self.admitted - 1

    def verdict(self, ordinal: int, *, kept: bool) -> None:
        """Before its turn. The place of a dropped draw is free at once if its batch may refill whatever comes before it."""
        if not kept and ordinal + 1 - (self.unsettled - self.filling) <= self.budget - self.batch:
            self._dropped.add(ordinal)
            self.held -= 1

    def over(self, ordinal: int) -> None:
        """It waits for its turn."""

    def surplus(self) -> range:
        """Draws to give back to the stream, as if they had never begun."""
        return range(0)

    def settle(self, *, kept: bool) -> None:
        """The verdict of the draw ``unsettled``."""
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
        """The ordinals of the next batch with the dropped ones, in order; ``None``: it is not complete yet."""
        if not self._complete:
            return None
        first = self.taken
        self.taken += self._complete.popleft()
        self._training = True
        return range(first, self.taken)

    def publish(self, version: int) -> None:
        """The engines have the weights that the batch taken last trained."""
        self.held -= self._training * self.batch
        self.version, self._training = version, False


@dataclass(slots=True)
class InAdvance(Admission):
    """For ``depth`` 0: begins as many draws as it may take to have ``batch`` kept ones, by the share that was kept so far, because
    replacing dropped draws one after the other would wait for one episode after the other. Batches are the same: what was begun
    beyond the last kept draw of a batch is given back.
    """

    asked: int = 1
    """Verdicts of the run, and one more that is kept."""
    granted: int = 1
    """The kept ones."""
    sure: int = 0
    """Kept draws of the batch that is filled."""
    _known: set[int] = field(default_factory=set)
    """Its draws that have a verdict."""

    @property
    def room(self) -> bool:
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
