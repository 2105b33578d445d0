"""Python's garbage collector, kept off what a process has loaded.

A full collection looks at every object there is. Where torch and transformers are loaded it takes a third of a second and finds
nothing, every few seconds.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def freeze() -> None:
    """Leave what is alive now out of all later collections: for a process that is the run's own, once it has started."""
    gc.collect()
    gc.freeze()


@contextmanager
def frozen() -> Iterator[None]:
    """``freeze`` for the body alone: the process may be a notebook's, whose models must be collected when they are dropped. In a
    process where something is frozen already, nothing changes."""
    if gc.get_freeze_count():
        yield
        return
    freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def collected_s() -> float:
    """Return the seconds that this process has spent in collections since the first call."""
    return _meter().seconds


@functools.cache
def _meter() -> _Meter:
    meter = _Meter()
    gc.callbacks.append(meter.note)
    return meter


class _Meter:
    def __init__(self) -> None:
        self.seconds = self._began = 0.0

    def note(self, phase: str, info: dict[str, Any]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        else:
            self.seconds += now - self._began
