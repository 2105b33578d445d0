"""The loop beside the controller: where work runs, how it is interrupted, and that nothing a plugin does can hang it."""

import asyncio
import os
import signal
import threading
import time

import pytest

from rlhf_host.errors import RunError
from rlhf_host.training.events import EventLoop, Interrupted, event_loop


@pytest.fixture(params=[False, True], ids=["thread", "debug"])
def events(request):
    with event_loop(request.param) as loop:
        yield loop


async def value(result):
    await asyncio.sleep(0)
    return result


def test_results_and_errors_come_back(events):
    assert events.run(value(3)) == 3

    async def fails():
        raise RunError("no")

    with pytest.raises(RunError, match="no"):
        events.run(fails())


def test_an_interrupt_waits_until_what_it_cancelled_has_ended(events):
    ended = []

    async def slow():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            ended.append(True)

    with pytest.raises(Interrupted):
        events.run(slow())
    assert ended == [True]
    assert events.stop_requested
    with pytest.raises(Interrupted):
        events.run(value(1))
    assert events.run(value(2), interruptible=False) == 2, "what must still be done is"


def test_the_second_signal_does_not_wait(events, monkeypatch):
    with pytest.raises(Interrupted):
        events.run(_interrupting())
    signal.raise_signal(signal.SIGINT)  # as `timeout -s INT` does, to the process and to its group
    monkeypatch.setattr("rlhf_host.training.events.TWICE_S", 0.0)  # some time later
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


async def _interrupting():
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(60)


def test_a_closed_terminal_may_say_so_twice(events):
    """The kernel and the shell both send SIGHUP; the second signal of another kind still does not wait."""
    signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGHUP)
    assert events.stop_requested
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("debug", [False, True], ids=["thread", "debug"])
def test_signals_that_are_ignored_at_the_start_stay_ignored_but_sigterm(debug):
    """A command that a script starts with ``&``, or with ``nohup``, begins so."""
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        with event_loop(debug) as loop:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGHUP)
            assert not loop.stop_requested
            signal.raise_signal(signal.SIGTERM)
            assert loop.stop_requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_coroutine_that_ends_the_thread_is_an_error_not_a_hang():
    with EventLoop() as events:

        async def leave():
            raise SystemExit(3)

        started = time.monotonic()
        with pytest.raises((RunError, SystemExit)):
            events.run(leave())
        assert time.monotonic() - started < 5


def test_a_task_that_will_not_be_cancelled_does_not_hide_the_end(monkeypatch):
    events = EventLoop()

    async def stubborn():
        async def forever():
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    continue

        asyncio.get_running_loop().create_task(forever())
        await asyncio.sleep(0)

    events.run(stubborn())
    monkeypatch.setattr("rlhf_host.training.events.CLOSE_S", 0.2)
    events.close()


def test_debugging_runs_coroutines_on_the_thread_that_waits():
    async def where():
        await asyncio.sleep(0)
        return threading.current_thread()

    with event_loop(debug=True) as events:
        assert events.run(where()) is threading.current_thread()
    with event_loop(debug=False) as events:
        assert events.run(where()) is not threading.current_thread()


def test_an_interrupted_debug_loop_still_closes_what_is_open():
    """Leaving the debugger raises through the loop; what must be closed is awaited on it afterwards."""
    events = event_loop(debug=True)

    async def leave():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        events.run(leave())
    assert events.run(value("closed"), interruptible=False) == "closed"
    events.close()
