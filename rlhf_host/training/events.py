"""The run's event loop in its own thread, and requests to stop a run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, wait
from typing import Any, TypeVar

from rlhf_host.errors import RunError, UserError, asks_to_stop
from rlhf_host.interrupts import TWICE_S, handled

T = TypeVar("T")

ENDED = "the event loop has ended: a plugin ended its thread"
WAKE_S = 0.5
"""Seconds between two checks for signals by the waiting thread."""
CLOSE_S = 10.0
"""Seconds that closing waits for cancelled tasks."""


class Interrupted(Exception):
    """The run was asked to stop while it waited for the event loop."""


class EventLoop:
    """Runs coroutines from the controller's thread; works inside notebooks, where the main thread has a loop already.

    As a context manager it also turns the first SIGINT, SIGTERM or SIGHUP into ``stop_requested`` (and cancels what is being
    awaited); a second one raises ``KeyboardInterrupt``. A terminal that is closed may send SIGHUP twice, and ``timeout`` any
    signal within a moment; these count as one.
    SIGINT and SIGHUP stay ignored where they were ignored before.
    """

    _signal: tuple[int, float] = (0, 0.0)
    """The last signal, and when it came."""

    def __init__(self) -> None:
        self.stop_requested = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rlhf-events", daemon=True)
        self._waiting: asyncio.Task[Any] | None = None
        self._awaited: Future[Any] | None = None
        self._ended = self._closing = False
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], *, interruptible: bool = True) -> T:
        """Waits for a coroutine on the loop. Raises ``Interrupted`` if a stop was requested meanwhile; the coroutine is then
        cancelled.
        """
        if interruptible and self.stop_requested:
            work.close()
            raise Interrupted
        future = self._awaited = asyncio.run_coroutine_threadsafe(self._tracked(work, interruptible), self._loop)
        if self._ended:  # before ``_run`` could see the future
            raise RunError(ENDED)
        # A signal that the kernel gives to another thread wakes nobody here: look now and then.
        while not wait([future], WAKE_S).done:
            pass
        try:
            return future.result()
        except (CancelledError, asyncio.CancelledError):
            raise Interrupted from None

    async def _tracked(self, work: Coroutine[Any, Any, T], interruptible: bool) -> T:
        if interruptible:
            self._waiting = asyncio.current_task()
            if self.stop_requested:
                work.close()
                raise asyncio.CancelledError
        try:
            return await work
        except asyncio.CancelledError as error:
            raise error if asks_to_stop(error) else RunError("the work was cancelled, and not by the host")  # noqa: B904 - its own cause stays
        finally:
            if interruptible:
                self._waiting = None

    def _run(self) -> None:
        try:
            while not self._closing:
                with contextlib.suppress(KeyboardInterrupt, SystemExit):  # of a task, which has it: who awaits that is told
                    self._loop.run_forever()
        finally:
            self._ended = True
            if self._awaited is not None and not self._awaited.done():
                self._awaited.set_exception(RunError(ENDED))

    def __enter__(self) -> EventLoop:
        self._signals = handled(self._on_signal, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._signals.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._signals.__exit__(None, None, None)
        self.close()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        if not self._ended:
            with contextlib.suppress(TimeoutError):  # a task that will not be cancelled must not hide how the run ended
                asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(timeout=CLOSE_S)
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_signal(self, number: int, frame: Any) -> None:
        before, self._signal = self._signal, (number, time.monotonic())
        twice = before[0] == number and self._signal[1] < before[1] + TWICE_S
        if self.stop_requested and number != signal.SIGHUP and not twice:
            raise KeyboardInterrupt
        self.stop_requested = True
        self._loop.call_soon_threadsafe(self._cancel_waiting)

    def _cancel_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()


class LoopHere(EventLoop):
    """The same without its own thread: coroutines, and the hooks they call, run on the thread that waits (``debug``)."""

    def __init__(self) -> None:
        with contextlib.suppress(RuntimeError):  # there is none
            asyncio.get_running_loop()
            raise UserError(
                "debug runs the event loop in this thread, which has one already, as in a notebook: run it as a script"
            )
        self.stop_requested = False
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_quiet_about_interrupts)
        self._waiting = None

    def run(self, work: Coroutine[Any, Any, T], *, interruptible: bool = True) -> T:
        try:
            return self._loop.run_until_complete(self._tracked(work, interruptible))
        except asyncio.CancelledError:
            raise Interrupted from None

    def close(self) -> None:
        if not self._loop.is_closed():
            with contextlib.suppress(TimeoutError):
                self._loop.run_until_complete(self._cancel_in_time())
            self._loop.close()

    async def _cancel_in_time(self) -> None:
        async with asyncio.timeout(CLOSE_S):
            await self._cancel_all()


def _quiet_about_interrupts(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Silences reports of an interrupt that passed through a task: it was raised where the loop runs, and nobody reads the
    task.
    """
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)


def event_loop(debug: bool) -> EventLoop:
    return LoopHere() if debug else EventLoop()
