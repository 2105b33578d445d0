"""Runs of a sweep, so many at once: started, waited for, noted; interrupted together."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlhf_host import RunDirectory
from rlhf_host.commands import visible
from rlhf_host.runs import HEADLINES
from rlhf_sweep.folder import Folder
from rlhf_sweep.one_run import RunProcess
from rlhf_sweep.planned import Planned

POLL_S = 0.1
AT_ONCE_S = 15.0
"""Seconds in which a run ends that was interrupted twice."""
TAIL = 4096
"""Bytes of the end of a log in which an error is looked for."""


class Process(Protocol):
    def poll(self) -> int | None: ...
    def interrupt(self) -> None: ...
    def kill(self) -> None: ...


class Launcher(Protocol):
    """Place where runs are executed."""

    at_once: int

    def start(self, run: Planned, words: list[str], log: Path) -> Process: ...
    def has_room(self, run: Planned) -> bool: ...
    def close(self) -> None: ...


class Here:
    """Processes on this machine."""

    def __init__(self, at_once: int):
        self.at_once = at_once

    def start(self, run: Planned, words: list[str], log: Path) -> Process:
        return RunProcess(words, log)

    def has_room(self, run: Planned) -> bool:
        return True

    def close(self) -> None:
        pass


@dataclass(slots=True)
class _Running:
    run: Planned
    process: Process
    began: float


def execute(folder: Folder, launcher: Launcher, next_run: Callable[[], Planned | None], say: Callable[[str], None]) -> None:
    """Runs what ``next_run`` gives, until there is nothing more and all have ended. How each ended is in the folder's states.

    Args:
        next_run: the next run to start; None: none before another has ended.

    Raises:
        KeyboardInterrupt: the runs were interrupted; each has a checkpoint.
    """
    running: list[_Running] = []
    waiting: Planned | None = None
    try:
        while True:
            while len(running) < launcher.at_once:
                waiting = waiting or next_run()
                if waiting is None or (running and not launcher.has_room(waiting)):
                    break
                running.append(_start(folder, launcher, waiting, say))
                waiting = None
            if not running:
                return
            time.sleep(POLL_S)
            for each in [*running]:
                if (code := each.process.poll()) is not None:
                    running.remove(each)
                    say(_note(folder, each, code))
    except BaseException:
        _end(running, say)
        raise


def _start(folder: Folder, launcher: Launcher, run: Planned, say: Callable[[str], None]) -> _Running:
    folder.wait_until_free(run.name)
    run_dir = folder.run_dir(run.name)
    folder.forget(run.name)
    if (run_dir / "config.yaml").is_file():
        words = ["train", "--resume", str(run_dir)]
        say(f"{run.name}: goes on from {_step_text(RunDirectory(run_dir))}")
    else:
        folder.write_settings(run)
        words = ["train", "--config", str(folder.settings(run.name))]
        say(f"{run.name}: begins")
    return _Running(run, launcher.start(run, words, folder.log(run.name)), time.monotonic())


def _step_text(run: RunDirectory) -> str:
    return f"step {run.checkpoints[-1][0]}" if run.checkpoints else "its beginning: it has no checkpoint yet"


def _note(folder: Folder, ended: _Running, code: int) -> str:
    """Writes down how a run ended, and returns what to say of it."""
    name, seconds = ended.run.name, time.monotonic() - ended.began
    run_dir = folder.run_dir(name)
    run = RunDirectory(run_dir) if (run_dir / "config.yaml").is_file() else None
    if code == 0 and run is not None and run.status == "finished":
        folder.note_finished(name, seconds)
        headline = next((each for each in HEADLINES if each in run.curves), None)
        told = f": {headline} {run.curve(headline)[1][-1]:.4g}" if headline else ""
        return f"{name}: finished in {seconds:.0f} s{told}"
    error = _error(folder.log(name), run, code)
    folder.note(name, status="failed", error=error, code=code)
    return f"{name}: FAILED: {error}"


def _error(log: Path, run: RunDirectory | None, code: int) -> str:
    """Returns why a run failed, in one line."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"it was ended by {signal.Signals(-code).name}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
    if run is not None and run.about.get("status") == "failed" and run.about.get("error"):
        return visible(str(run.about["error"]).split("\n")[0])
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in log.read_bytes()[-TAIL:].decode("utf-8", "replace").split("\n") if line.strip()]
        said = [line for line in lines if line.startswith("Error")] or lines
        if said:
            return visible(said[-1].removeprefix("Error: "))
    return f"exit code {code}; {log} has what it said"


def _end(running: list[_Running], say: Callable[[str], None]) -> None:
    """Interrupts all and waits; a second interrupt ends them at once."""
    if running:
        say(f"Interrupting {len(running)} run{'s' * (len(running) > 1)}; each writes a checkpoint (Ctrl-C again: at once) ...")
    try:
        _interrupted(running, math.inf)
    except KeyboardInterrupt:  # the runs' second one, too: so they leave no processes, and nothing half-written
        for each in (left := _interrupted(running, AT_ONCE_S)):
            each.process.kill()
        while any(each.process.poll() is None for each in left):
            time.sleep(POLL_S)


def _interrupted(running: list[_Running], within_s: float) -> list[_Running]:
    """Interrupts all, and waits so long for their end; returns those that go on."""
    for each in running:
        each.process.interrupt()
    deadline = time.monotonic() + within_s
    while (left := [each for each in running if each.process.poll() is None]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left
