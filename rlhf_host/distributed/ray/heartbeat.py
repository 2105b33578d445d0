"""Detection of processes that exist but do not answer (stopped, or hanging). They are killed, so that whoever waits for them
gets an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

ASKS = 6
"""Number of checks within ``stall_s``."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process that is up."""

    name: str
    actor: Any
    ask: Callable[[], Any]
    """Returns a reference to its answer, which comes whatever else it does."""
    restarts: bool = False
    """True if Ray restarts it."""


class Heartbeat:
    """A thread that checks all processes again and again.

    Args:
        processes: returns the processes that are up now.
        stall_s: maximum seconds for an answer.
    """

    def __init__(self, processes: Callable[[], Iterable[Process]], stall_s: float):
        self._processes, self._stall_s = processes, stall_s
        self._asked: dict[Any, tuple[Any, float]] = {}
        """Per actor, the reference to its answer and the time of the request."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rlhf-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(self._stall_s / ASKS):
            self._look(list(self._processes()))

    def _look(self, processes: list[Process]) -> None:
        import ray

        now, asked = time.monotonic(), self._asked
        self._asked = {}
        for process in processes:
            reference, since = asked.get(process.actor, (None, now))
            if reference is None or ray.wait([reference], timeout=0)[0]:
                reference, since = process.ask(), now
            if now - since > self._stall_s:
                # Silent, not dead: of a process that died Ray itself tells.
                log.error(
                    "%s has not answered for %.0f s (it was stopped, or hangs), and is ended%s",
                    *(process.name, now - since, "; it is started again" if process.restarts else " (--ray.stall-s)"),
                )
                ray.kill(process.actor, no_restart=not process.restarts)
            else:
                self._asked[process.actor] = reference, since
