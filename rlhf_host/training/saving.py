"""A checkpoint on its way to disk while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

WAKE_S = 0.5
"""So often a thread that waits looks for signals."""


class Saving:
    """Work on a thread of its own, a daemon: a disk that hangs must not keep the process from ending.

    Args:
        step: what the checkpoint is of.
        work: writes it.
        here: do the work at once, on this thread.
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
        """Return when it is written. Raises what writing raised."""
        while not wait([self._result], WAKE_S).done:
            pass
        self._result.result()
