"""Watches the cells of a job: their output, the questions of their counted calls, their ends. Leaves nothing of them."""

import errno
import os
import select
import signal
import time
from contextlib import suppress

from . import family
from .cell import Cell, hear
from .filter import Asked
from .folders import entries, used
from .syscalls import CLONE, FORKS, MMAP, REMOVES, numbers

THREAD = 0x00010000
"""CLONE_THREAD."""
THREADS = 64
"""Maximum threads of a program, in all its processes."""
REMOVED = 64
"""Maximum number of files that a program may remove or rename: they take space while they are open."""
SHARED = 64 << 20
"""Maximum bytes of memory that a program makes to share with its children, because its owner cannot be seen."""
PATIENCE = 1000
"""Number of refused calls after which a program is ended."""
LOOK_S = 0.05
"""Seconds between checks of the memory of a program that has several processes."""
LINGER_S = 0.2
"""Seconds to read the rest of the pipes of a program that has ended: others may hold them for ever."""


class Watch:
    """Watches the cells of a job.

    Args:
        limits: limits of one program, by name; of a shell's command also ``disk``, in bytes.
        cells: the cells; the job ends with the first one.
        pipes: name → descriptor that is read to its end.
        filtered: True if each cell has a filter whose end it sends.
    """

    def __init__(self, limits: dict, cells: list[Cell], pipes: dict[str, int], filtered: bool):
        self.limits, self.cells = limits, cells
        self.unfiltered = list(cells) if filtered else []
        self.removes, self.forks = numbers(REMOVES), numbers(f"{FORKS} {CLONE}")
        self.clone, self.mmap = numbers(CLONE), numbers(MMAP)
        self.out = dict.fromkeys(pipes, b"")
        self.pipes = {end: name for name, end in pipes.items()}
        self.starting = {cell.status.fileno(): cell for cell in cells}
        self.asking: dict[int, Cell] = {}
        """End of a filter → its cell."""
        self.ending: int | None = os.pidfd_open(cells[0].pid)
        self.code: int | None = None
        self.problem = self.excess = ""
        self.poll = select.poll()
        for end in (*self.pipes, *self.starting, self.ending):
            self.poll.register(end, select.POLLIN)

    def start(self, within_s: float) -> None:
        """Waits until the programs run, so that their time begins with them."""
        end_s = time.monotonic() + within_s
        while self.starting and not self.problem and (left := end_s - time.monotonic()) > 0:
            for end, events in self.poll.poll(1000 * left):
                self._handle(end, events)

    def until(self, end_s: float) -> str:
        """Returns why the first cell is over: it ended, is late, used too much, or the jail failed."""
        look = 0.0
        while True:
            left = end_s - time.monotonic()
            if self.code is not None and (left <= 0 or not self.pipes):
                return "ended"
            if left <= 0:
                return "late"
            several = any(cell.forked for cell in self.cells) or "disk" in self.limits
            for end, events in self.poll.poll(1000 * min(left, LOOK_S if several else left)):
                self._handle(end, events)
            if self.code is not None:
                end_s = min(end_s, time.monotonic() + LINGER_S)
            if several and time.monotonic() >= look:
                self._look_at_memory()
                self._look_at_disk()
                look = time.monotonic() + LOOK_S
            if self.problem:
                return "jail"
            if self.excess:
                return self.excess

    def _handle(self, end: int, events: int) -> None:
        if end in self.pipes:
            self._read(end)
        elif end in self.starting:
            self._started(end)
        elif end == self.ending:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.cells[0].pid, 0)[1])
            self.ending = None
            self._forget(end)
        elif events & select.POLLIN:
            with suppress(OSError):
                self._asked(Asked(end), self.asking[end])
        else:
            del self.asking[end]
            self._forget(end)

    def _read(self, end: int) -> None:
        chunk = os.read(end, 1 << 16)
        name = self.pipes[end]
        self.out[name] += chunk
        if len(self.out[name]) > self.limits["output"]:
            self.excess = "output"
        if not chunk:
            del self.pipes[end]
            self._forget(end)

    def _started(self, end: int) -> None:
        """Handles a cell's report: what is wrong, its filter's end, or nothing, which means that its program runs."""
        cell = self.starting[end]
        text, ends = hear(cell.status)
        for asking in ends:
            self.asking[asking] = cell
            self.unfiltered.remove(cell)
            self.poll.register(asking, select.POLLIN)
        if not text:
            del self.starting[end]
            self.poll.unregister(end)
            cell.status.close()
        elif not ends:
            self.problem = self.problem or text.decode("utf-8", "replace")

    def _asked(self, call: Asked, cell: Cell) -> None:
        error = 0
        if call.number in self.forks:
            error = self._may_start(cell, bool(call.number in self.clone and call.arguments[0] & THREAD))
        elif call.number in self.removes:
            cell.removed += 1
            error = errno.EDQUOT if cell.removed > REMOVED else 0
        elif call.number in self.mmap:
            cell.shared += call.arguments[1]
            error = errno.ENOMEM if cell.shared > SHARED else 0
        elif entries(cell.folder, self.limits["files"]) >= self.limits["files"]:
            error = errno.EDQUOT
        cell.refused += error != 0
        if cell.refused > PATIENCE:
            self.excess = "refused"
        call.answer(error)

    def _may_start(self, cell: Cell, thread: bool) -> int:
        pids = self._processes(cell)
        if (len(pids) if not thread else 0) >= self.limits["processes"] or family.threads(pids) >= THREADS:
            return errno.EAGAIN
        cell.forked = cell.forked or not thread
        return 0

    def _processes(self, cell: Cell) -> list[int]:
        """Returns the processes of a cell without its first, which only waits, and those that any cell left to the jail."""
        first = [each.pid for each in self.cells]
        left = [pid for pid in family.children(os.getpid()) if pid not in first]
        return family.descendants([*family.children(cell.pid), *left])

    def _look_at_memory(self) -> None:
        for cell in self.cells:
            if cell.forked and family.memory(self._processes(cell)) > self.limits["memory"]:
                self.excess = "memory"

    def _look_at_disk(self) -> None:
        if "disk" in self.limits:
            for cell in self.cells:
                if entries(cell.folder, self.limits["files"] + 1) > self.limits["files"]:
                    self.excess = "files"
                elif used(cell.folder) + family.removed_bytes(self._processes(cell)) > self.limits["disk"]:
                    self.excess = "disk"

    def _forget(self, end: int) -> None:
        self.poll.unregister(end)
        os.close(end)

    def close(self) -> None:
        """Ends the cells and everything left of them, then closes their descriptors."""
        reap([cell.pid for cell in self.cells])
        for end in [*self.pipes, *([] if self.ending is None else [self.ending])]:
            os.close(end)
        for end in list(self.starting):  # what they still say: all have ended
            while end in self.starting:
                self._started(end)
        for end in self.asking:
            os.close(end)
        if self.unfiltered:
            self.problem = self.problem or "a cell was not set up"


def reap(pids: list[int]) -> None:
    """Ends processes, and all others of which this process is or becomes the parent."""
    for pid in pids:
        for kill in (os.killpg, os.kill):
            with suppress(OSError):
                kill(pid, signal.SIGKILL)
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            for child in family.children(os.getpid()):
                with suppress(OSError):
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
