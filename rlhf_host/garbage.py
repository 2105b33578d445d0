"""Python's garbage collector, kept away from objects that stay loaded.

A full collection visits every object. With torch and transformers loaded it takes a third of a second, every few seconds, and
finds nothing.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def freeze() -> None:
    """Excludes all living objects from later collections: for a process that only runs this run, once it has started."""
    gc.collect()
    gc.freeze()


@contextmanager
def frozen() -> Iterator[None]:
    """Does the same as ``freeze``, only inside the block: the process may be a notebook's, whose models must be collected when
    they are dropped. If something is frozen already, nothing changes.
    """
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
