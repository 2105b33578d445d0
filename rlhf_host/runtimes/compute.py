"""The one thread of a process on which models are loaded, trained and sampled."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch

from rlhf_host.errors import RunError
from rlhf_host.interrupts import end_thread

_Work: TypeAlias = tuple[Future[Any], Callable[[], Any]]

END_S = 10.0
"""Seconds that an operator which is under way may take when the thread ends."""


class OneThread:
    """Does work in the order it was submitted. No work waits for other work, so there are no deadlocks.

    The thread's operators use ``threads`` threads (0: as torch finds it). All other threads of the process should use one, or a
    second OpenMP pool starts on the same cores and both get several times slower: the caller's thread is set to one.
    """

    found = 1
    """Threads of torch before the first one here set the caller's to one, for all that come later."""

    def __init__(self, threads: int = 0):
        OneThread.found = max(OneThread.found, torch.get_num_threads())
        self._threads = threads or OneThread.found
        torch.set_num_threads(1)
        self._closed = False
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rlhf-compute", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        if self._closed:
            raise RunError("the run's compute thread has ended")
        future: Future[Any] = Future()
        self._queue.put((future, work))
        return future

    def close(self) -> None:
        """Ends the thread, and work that nobody has waited for, as of a run that was interrupted."""
        self._closed = True
        self._queue.put(None)
        end_thread(self._thread, END_S)

    def _run(self) -> None:
        torch.get_num_threads()  # sets up torch's threads, so that the next line is the last word
        torch.set_num_threads(self._threads)
        works = iter(self._queue.get, None)
        with contextlib.suppress(SystemExit):
            do(works)
        for future, _ in works:
            future.cancel()


class Inline:
    """Runs work at once, on the caller's thread, where a debugger can follow it."""

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        do([(future, work)])
        return future

    def close(self) -> None:
        pass


def do(works: Iterable[_Work]) -> None:
    """Does each work and stores its result in its future. Raises anything that is not an ``Exception``, such as
    ``KeyboardInterrupt``.
    """
    for future, work in works:
        if not future.set_running_or_notify_cancel():
            continue
        try:
            result = work()
        except StopIteration as error:  # in asyncio's futures there is no room for it: who awaits it would wait forever
            future.set_exception(RuntimeError(f"StopIteration: {error}").with_traceback(error.__traceback__))
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            future.set_result(result)
            del result
        del future, work  # or they live until the next work
