"""Clocks of processes: how far that of another machine is from the controller's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Reading(NamedTuple):
    """A question to a process: when it was asked and answered by the controller's clock, and the process's own clock between."""

    asked: int
    theirs: int
    answered: int


def offset(readings: Sequence[Reading]) -> tuple[int, int]:
    """Returns a clock's lead over the controller's, and its largest error, of the quickest answer (Cristian's algorithm): half of
    the time that this answer took."""
    quickest = min(readings, key=lambda each: each.answered - each.asked)
    return quickest.theirs - (quickest.asked + quickest.answered) // 2, (quickest.answered - quickest.asked + 1) // 2
