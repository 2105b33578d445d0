"""The one thread of a process on which models are loaded, trained and sampled, and nowhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch

from rlhf_host.errors import RunError


class OneThread:
    """Does work in the order it was submitted. Work waits for no other work, so nothing can lock up.

    The thread's operators use ``threads`` threads (0: as torch finds it). All other threads of the process should use one,
    or a second OpenMP pool starts on the same cores and both get several times slower: the caller's thread is set to one.
    """

    def __init__(self, threads: int = 0):
        self._threads = threads or torch.get_num_threads()
        torch.set_num_threads(1)
        self._closed = False
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="rlhf-compute", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        if self._closed:
            raise RunError("the run's compute thread has ended")
        future: Future[Any] = Future()
        self._queue.put((future, work))
        return future

    def close(self) -> None:
        """End the thread after what is submitted already."""
        self._closed = True
        self._queue.put(None)

    def _work(self) -> None:
        torch.get_num_threads()  # sets up torch's threads, so that the next line is the last word
        torch.set_num_threads(self._threads)
        while (item := self._queue.get()) is not None:
            run_into(*item)
            del item  # or the last result lives until the next work


class Inline:
    """Work runs at once, on the caller's thread, where a debugger can follow it."""

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        run_into(future, work)
        return future

    def close(self) -> None:
        pass


def run_into(future: Future[Any], work: Callable[[], Any]) -> None:
    """Do ``work`` and have ``future`` say what came of it. Raises what is no ``Exception``, such as ``KeyboardInterrupt``."""
    if not future.set_running_or_notify_cancel():
        return
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
