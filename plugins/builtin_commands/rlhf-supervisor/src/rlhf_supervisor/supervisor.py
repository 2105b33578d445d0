"""``supervised``: the caller goes on in a process of its own, and in a new one whenever that dies."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from rlhf_host import UserError
from rlhf_host.commands import rlhf, visible
from rlhf_supervisor.ends import ASKED, Attempt, End, newest_checkpoint
from rlhf_supervisor.processes import Earlier, adopt_orphans, end_leftovers, end_with, hold, reap

FIRST_S, LONGEST_S = 2.0, 300.0
"""Seconds before the first restart after some progress, and most of all; each that follows waits twice as long."""
LOOK_S = 0.1
"""Seconds between two looks at the run's process."""
CLOCK_S = 0.02
"""Seconds by which the clock of files may be behind."""
SENT_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGHUP,
    signal.SIGUSR1: signal.SIGTERM,
}
"""Signal to the supervisor → what the run gets. SIGUSR1 is what SLURM is asked to send some time before the end."""


def supervised(run_dir: str | Path, *, restarts: int) -> Path | None:
    """Goes on in a process of its own; when that dies, in another, from the run's last checkpoint. The process that called watches
    them, and exits with the last one's exit code.

    A run is over when it succeeds (exit code 0), when its settings cannot be used (2), when somebody ends it (Ctrl-C, SIGTERM),
    when the same error comes at the same step twice, or after so many restarts.

    Args:
        run_dir: the run's directory, which may be there already.
        restarts: how often it begins again.

    Returns:
        In each of the processes: the directory if it has a run to be resumed, or None for a run that begins.

    Raises:
        UserError: another supervisor has the run, or this process has threads, which would not be there in the others.
    """
    directory = Path(run_dir)
    if threading.active_count() > 1:
        others = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        raise UserError(f"a run is supervised from the beginning of a program: this one has threads already ({others})")
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        raise UserError("a run is supervised from the beginning of a program: this one uses a GPU already")
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    held = hold(directory)
    supervisor = Supervisor(directory, restarts)
    while supervisor.begin():
        if (code := supervisor.watch()) is not None:
            supervisor.let_go()
            with contextlib.suppress(OSError):  # it is not empty
                for path in made:
                    path.rmdir()
            _exit(code)
    if held is not None:
        os.close(held)
    return directory if (directory / "config.yaml").is_file() else None


def _exit(code: int) -> NoReturn:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    raise SystemExit(code)


class Supervisor:
    """The processes of one run, one after the other."""

    def __init__(self, run_dir: Path, restarts: int):
        self.run_dir, self.restarts = run_dir, restarts
        self._done = 0
        self._wait_s = FIRST_S
        self._last: End | None = None
        self._saved = newest_checkpoint(run_dir)
        """Step of the newest checkpoint when the last process ended."""
        self._expected: tuple[int | None, int] | None = None
        """Checkpoint that the next process should take, and the last step before, until it has begun."""
        self._child = 0
        self._asked: tuple[int, float] | None = None
        """The first signal that ends the run, and when it came."""
        self._handlers: dict[int, Any] = {}
        for number in SENT_ON:
            # nohup ignores SIGHUP, and a script that starts a command with & ignores SIGINT: both on purpose.
            if number in (signal.SIGTERM, signal.SIGUSR1) or signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._on_signal)
        self._earlier = Earlier.now()
        adopt_orphans()

    def begin(self) -> bool:
        """Starts a process; returns False in that, and True here."""
        self._attempt = Attempt(self.run_dir)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        parent, before = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, SENT_ON)
        self._child = os.fork()
        if not self._child:
            self.let_go()
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM may send it to all; the supervisor answers it
            end_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self._child and self._asked is not None:
            os.kill(self._child, signal.SIGTERM)
        return bool(self._child)

    def let_go(self) -> None:
        """Gives signals back to those who had them."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def watch(self) -> int | None:
        """Waits for the process's end and for what follows; returns the exit code if the run is over, or None."""
        code = self._wait()
        self._compare()
        end = self._attempt.end(code)
        if self._asked is not None:
            self._say_how_it_was_saved(*self._asked)
        if end.code in (0, 2, *ASKED):
            return end.exit_code
        if killed := end_leftovers(self._earlier):
            say(f"{killed} processes of it were still there, and were killed.")
        if self._asked is not None:
            return end.exit_code
        saved, before = newest_checkpoint(self.run_dir), self._saved
        died = f"The run died {end.where}: {end.what}."
        if end.same(self._last):
            say(f"{died} It was the same error at the same step as before, so the run ends.{self._by_hand()}")
            return end.exit_code
        if self._done == self.restarts:
            say(f"{died} It had all its restarts (--max-restarts {self.restarts}), so it ends.{self._by_hand()}")
            return end.exit_code
        progress = saved is not None and saved != before
        self._wait_s = FIRST_S if progress or self._last is None else min(2 * self._wait_s, LONGEST_S)
        self._done, self._last, self._saved = self._done + 1, end, saved
        self._expected = saved, end.step or 0
        say(f"{died} {self._way_on(*self._expected)} in {self._wait_s:g} s (restart {self._done} of {self.restarts}).")
        return self._pause()

    def _by_hand(self) -> str:
        resumes = (self.run_dir / "config.yaml").is_file()
        return f" Continue with:\n  {rlhf('train', '--resume', self.run_dir)}" if resumes else ""

    def _compare(self) -> None:
        """Says so if the run took another checkpoint than the newest, as it does when that is damaged."""
        if self._expected is not None and self._attempt.begun:
            (expected, last), self._expected = self._expected, None
            if expected is not None and (taken := self._attempt.resumed_after) != expected:
                way = self._way_on(taken, last).removesuffix(",")
                say(f"The checkpoint of step {expected} could not be used, as it says above. {way}.")

    def _way_on(self, saved: int | None, last: int) -> str:
        first = (saved or 0) + 1
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        again = f", does {steps} again," if first <= last else ""
        begins = "It has no checkpoint, begins anew" if saved is None else f"It goes on from the checkpoint of step {saved}"
        return begins + again

    def _pause(self) -> int | None:
        until = time.monotonic() + self._wait_s
        while (left := until - time.monotonic()) > 0:
            if self._asked is not None:
                say(f"Ended while it waited.{self._by_hand()}")
                return 130
            time.sleep(min(LOOK_S, left))
        return None

    def _wait(self) -> int:
        """Waits for the run's process, and for what it leaves behind; returns its exit code."""
        while True:
            reap(self._earlier, but=self._child)
            number, status = os.waitpid(self._child, os.WNOHANG | os.WUNTRACED | getattr(os, "WCONTINUED", 0))
            if not number:
                self._compare()
                time.sleep(LOOK_S)
            elif os.WIFSTOPPED(status):
                name = signal.Signals(os.WSTOPSIG(status)).name
                say(f"The run is stopped ({name}) and waits: kill -CONT {number} lets it go on.")
            elif os.WIFCONTINUED(status):
                say("The run goes on.")
            else:
                self._child = 0
                return os.waitstatus_to_exitcode(status)

    def _on_signal(self, number: int, frame: Any) -> None:
        first, self._asked = self._asked is None, self._asked or (number, time.time())
        if self._child and not (first and number == signal.SIGINT and _of_the_terminal()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, SENT_ON[signal.Signals(number)])

    def _say_how_it_was_saved(self, number: int, when: float) -> None:
        saved = newest_checkpoint(self.run_dir)
        path = self.run_dir / f"checkpoints/step-{saved or 0:06d}"
        with contextlib.suppress(OSError):
            took = path.stat().st_ctime - when
            written = f"was written {max(took, 0):.1f} s after it" if took > -CLOCK_S else "was there already"
            say(f"{signal.Signals(number).name}: the checkpoint of step {saved} {written}.")


def _of_the_terminal() -> bool:
    """Returns True if Ctrl-C goes to all processes of this one's group, the run's among them."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def say(text: str) -> None:
    shown = "\n".join(map(visible, f"Supervisor, {time.strftime('%H:%M:%S')}: {text}".split("\n")))
    with contextlib.suppress(OSError, ValueError):  # a full disk, or a terminal that is closed, ends no run
        sys.stderr.flush()
        # Past the buffer: a fork would take along what could not be written, and fail at its end.
        os.write(sys.stderr.fileno(), f"{shown}\n".encode())
