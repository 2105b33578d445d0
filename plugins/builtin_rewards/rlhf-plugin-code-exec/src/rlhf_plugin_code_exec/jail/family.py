"""Processes and their use of resources, from ``/proc``."""

import os
import stat

LISTED = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
"""True if the kernel lists the children of a process, as most do; else all processes are examined."""


def children(pid: int) -> list[int]:
    """Returns the processes that it started and that have not ended."""
    if not LISTED:
        return [each for each, parent in _parents() if parent == pid]
    found: list[int] = []
    for task in _tasks(pid):
        try:
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
        except OSError:
            pass  # it has ended
    return found


def descendants(roots: list[int]) -> list[int]:
    """Returns the processes, those that they started, and so on."""
    found = list(roots)
    for pid in found:
        found += children(pid)
    return found


def threads(pids: list[int]) -> int:
    return sum(len(_tasks(pid)) for pid in pids)


def memory(pids: list[int]) -> int:
    """Returns bytes; shared memory counts once, if the kernel reports it."""
    return sum(map(_memory, pids))


def removed_bytes(pids: list[int]) -> int:
    """Returns the bytes of removed files that these processes hold open or mapped."""
    files: dict[tuple[int, int, int], int] = {}
    for pid in pids:
        for name, size in _mapped(pid):
            files[name] = max(size, files.get(name, 0))
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for name in names:
            try:
                about = os.stat(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue
            if about.st_nlink == 0 and stat.S_ISREG(about.st_mode):
                name = os.major(about.st_dev), os.minor(about.st_dev), about.st_ino
                files[name] = max(about.st_blocks << 9, files.get(name, 0))
    return sum(files.values())


def _mapped(pid: int):
    """Yields removed files that it has mapped, with the bytes of the mapping."""
    try:
        with open(f"/proc/{pid}/maps") as file:
            lines = file.readlines()
    except OSError:
        return
    for line in lines:
        if line.endswith(" (deleted)\n"):
            place, _, _, device, number, *_ = line.split()
            begin, end = (int(each, 16) for each in place.split("-"))
            major, minor = (int(each, 16) for each in device.split(":"))
            yield (major, minor, int(number)), end - begin


def _memory(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith(("Pss:", "SwapPss:")))
    except OSError:
        try:
            with open(f"/proc/{pid}/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 0


def _tasks(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _parents():
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    yield int(name), int(file.read().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                pass
