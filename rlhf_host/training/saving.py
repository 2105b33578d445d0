"""Writing of a checkpoint while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

WAKE_S = 0.5
"""Seconds between two checks for signals by a waiting thread."""


class Saving:
    """Work on its own daemon thread, so that a disk that hangs does not keep the process from ending.

    Args:
        step: step of the checkpoint.
        work: writes it.
        here: does the work at once, on this thread.
    """

    def __init__(self, step: int, work: Callable[[], None], *, here: bool = False):
        self.step = step
        self._result: Future[None] = Future()
        if here:
            self._do(work)
        else:
            threading.Thread(target=self._do, args=(work,), name="rlhf-checkpoint", daemon=True).start()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
            self._result.set_result(None)
        except BaseException as error:
            self._result.set_exception(error)

    @property
    def done(self) -> bool:
        return self._result.done()

    def wait(self) -> None:
        """Waits until it is written. Raises the errors of writing."""
        while not wait([self._result], WAKE_S).done:
            pass
        self._result.result()
