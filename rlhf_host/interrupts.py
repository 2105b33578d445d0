"""Interrupts: signals that end a command as Ctrl-C does, and threads whose work nobody wants any more then."""

from __future__ import annotations

import contextlib
import ctypes
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

TWICE_S = 0.2
"""Seconds within which a signal that comes again is the same one: ``timeout`` sends it to a process, then to its group."""

IDLE_S = 0.1
"""Seconds in which a thread without work ends."""


@contextlib.contextmanager
def handled(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Gives these signals to ``handler`` meanwhile, in the main thread; SIGINT and SIGHUP stay ignored where they were."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            # nohup ignores SIGHUP, and a script that starts a command with & ignores SIGINT: both on purpose.
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def signals_interrupt() -> contextlib.AbstractContextManager[None]:
    """Makes SIGTERM and SIGHUP raise ``KeyboardInterrupt`` meanwhile, as Ctrl-C does."""
    came: dict[int, float] = {}

    def interrupt(number: int, frame: Any) -> None:
        last, came[number] = came.get(number, -math.inf), time.monotonic()
        if came[number] > last + TWICE_S:
            raise KeyboardInterrupt

    return handled(interrupt, signal.SIGTERM, signal.SIGHUP)


def end_thread(thread: threading.Thread, within_s: float) -> None:
    """Raises ``SystemExit`` in a thread that has work, as soon as it is in Python code, and waits so long for its end.

    A daemon thread that still works when the interpreter ends may abort the process (SIGABRT), from inside torch.
    """
    thread.join(IDLE_S)
    if thread.is_alive() and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    thread.join(within_s)
