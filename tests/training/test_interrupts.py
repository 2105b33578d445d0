"""Signals that end a command before its event loop runs, and threads that end with it."""

import os
import signal
import threading
import time

import click
import pytest
from click.testing import CliRunner

from rlhf_host.cli.main import main
from rlhf_host.directories import new_directory
from rlhf_host.interrupts import signals_interrupt
from rlhf_host.runtimes.compute import OneThread
from rlhf_host.training.keeper import Saving

ENDING = (signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("number", [signal.SIGINT, *ENDING])
def test_every_command_ends_with_130(number, monkeypatch):
    """This one has no event loop, as while data is read or libraries are loaded."""

    @click.command()
    def waits():
        os.kill(os.getpid(), number)
        time.sleep(10)

    before = [signal.getsignal(each) for each in ENDING]
    monkeypatch.setattr(main, "get_command", lambda ctx, name: waits)
    ended = CliRunner().invoke(main, ["waits"])
    assert (ended.exit_code, ended.output) == (130, "Interrupted.\n")
    assert [signal.getsignal(each) for each in ENDING] == before


def test_a_signal_that_comes_twice_at_once_does_not_cut_what_the_first_one_began(monkeypatch):
    """A terminal that is closed sends it so, and ``timeout`` does."""
    with signals_interrupt():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        monkeypatch.setattr("rlhf_host.interrupts.TWICE_S", 0.0)  # some time later
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)


def test_nohup_keeps_a_command_from_ending_with_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_interrupt():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def busy(begun):
    begun.set()
    while True:
        time.sleep(0.01)


def test_a_compute_thread_that_is_closed_ends_its_work_and_whoever_waits_for_more_hears_of_it():
    compute, begun = OneThread(1), threading.Event()
    working, next_one = compute.submit(lambda: busy(begun)), compute.submit(lambda: 3)
    begun.wait(10)
    compute.close()
    assert not compute._thread.is_alive()
    assert isinstance(working.exception(0), SystemExit)
    assert next_one.cancelled()


def test_a_checkpoint_that_is_abandoned_leaves_nothing_half_written(tmp_path):
    begun = threading.Event()

    def write():
        with new_directory(tmp_path / "step-000002") as directory:
            (directory / "weights").write_bytes(b"half")
            busy(begun)

    saving = Saving(2, write)
    begun.wait(10)
    assert [path.name for path in tmp_path.iterdir()] == [".step-000002.partial"]
    saving.abandon()
    assert not list(tmp_path.iterdir())
