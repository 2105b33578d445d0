"""Processes of vLLM's core: their lives are the host's to end, and end with it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker


@contextlib.contextmanager
def own_process() -> Iterator[None]:
    """Keeps Ctrl-C and a closed terminal from processes that start inside.

    These signals go to all processes of a terminal, and vLLM's would end while the host still finishes its step. A blocked
    signal is inherited.
    """
    resource_tracker.ensure_running()  # Python's first process starts it, and that start ends with all signals let through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class EndsWithHost:
    """A method that ``vllm_worker`` adds to vLLM's workers."""

    def end_with(self, host: int) -> None:
        """Ends vLLM's core, and this worker with it, when the process ``host`` is gone, however that ended.

        vLLM's core does not notice it by itself, and would hold its memory for good.
        """
        core = os.getpid() if os.getppid() == host else os.getppid()
        threading.Thread(target=_outlive, args=(host, core), name="rlhf-host", daemon=True).start()


def _outlive(host: int, core: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was gone before this began
        select.select([os.pidfd_open(host)], [], [])
    for process in (core, os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
