"""Processes of vLLM's core: their lives are the host's to end, and end with it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import InvalidStateError
from multiprocessing import connection, resource_tracker
from typing import Any

from rlhf_host.errors import RunError


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


@contextlib.contextmanager
def paused(core: Any) -> Iterator[None]:
    """Pauses computation in a core's process inside the block."""
    core.call_utility("pause_scheduler", "keep", False)
    try:
        yield
    finally:
        core.call_utility("resume_scheduler")


class CoreWatch:
    """Ends the waiting for a core that has ended: vLLM's client for one thread would wait for its answers for good.

    Args:
        client: ``LLMEngine.engine_core`` of a core in a process of its own.
    """

    def __init__(self, client: Any):
        self.failure: RunError | None = None
        """Error for all who wait, once the core has ended."""
        self._client, self._cores = client, list(client.resources.engine_manager.processes)
        threading.Thread(target=self._watch, name="rlhf-core", daemon=True).start()

    def _watch(self) -> None:
        connection.wait([core.sentinel for core in self._cores])
        self.failure = RunError("the process of vLLM's core has ended; if nobody killed it, look for a lack of memory")
        self._client.resources.engine_dead = True  # from now on vLLM refuses to ask
        self._client.outputs_queue.put_nowait(self.failure)
        for answer in list(self._client.utility_results.values()):
            with contextlib.suppress(InvalidStateError):
                answer.set_exception(self.failure)


class EndsWithHost:
    """A method that ``worker`` adds to vLLM's workers."""

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
