"""One job: it is read from the standard input, and its result is written to the standard output, both by ``marshal``, because
importing ``json`` would take a tenth of the time. A shell is a job that goes on: see ``shell.py``.

Level A: user, pid, mount, network and IPC namespaces of its own for each cell, Landlock, a filter of system calls, and limits.
Level B, where namespaces are not allowed: the others, with every process that is left over killed by this one, their reaper. At
level ``none`` there are limits alone.
"""

import marshal
import os
import signal
import sys
import time
from contextlib import suppress

from . import landlock, shell
from .cell import Cell, user_of
from .folders import Job
from .kernel import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, control
from .syscalls import ARCHITECTURES, MACHINE
from .watch import Watch, reap

NOTHING = "/dev/null"


def functions(job: dict, place: Job, until: float) -> dict:
    """Runs a solution in one cell, and tests in another that calls it; the verdict comes from the tests' cell. Tests that are
    rehearsed have no solution.
    """
    calls, answers, verdict = os.pipe(), os.pipe(), os.pipe()
    nothing = os.open(NOTHING, os.O_RDWR)
    one, other = user_of(job, 0), user_of(job, 0 if job["shares_files"] else 1)
    tests = place.file("tests", job["tests"], one)
    judge_ends = {0: tests, 1: nothing, 2: nothing, 3: calls[1], 4: answers[0], 5: verdict[1]}
    cells = [_cell(job, place, "judge", one, "tests_work", judge_ends)]
    if "code" in job:
        code = place.file("solution.py", job["code"].encode("utf-8", "replace"), other)
        solution_ends = {0: code, 1: nothing, 2: nothing, 3: calls[0], 4: answers[1]}
        cells.append(_cell(job, place, "solution", other, "tests_work" if job["shares_files"] else "work", solution_ends))
        os.close(code)
    for end in (*calls, *answers, verdict[1], nothing, tests):
        os.close(end)
    return _watched(job, cells, {"verdict": verdict[0]}, until)


def program(job: dict, place: Job, until: float, given: str) -> dict:
    """Runs a program that reads its standard input; returns its output."""
    told, wrote = os.pipe(), os.pipe()
    user = user_of(job, 0)
    for end in (told[1], wrote[1]):  # a program may open /dev/stdout
        os.fchown(end, user, -1)
    code = place.file("program.py", job["code"].encode("utf-8", "replace"), user)
    stdin = place.file("input", given.encode("utf-8", "replace"), user)
    cell = _cell(job, place, "program", user, "work", {0: stdin, 1: wrote[1], 2: told[1], 3: code}, given=(stdin,))
    for end in (told[1], wrote[1], code, stdin):
        os.close(end)
    return _watched(job, [cell], {"stdout": wrote[0], "stderr": told[0]}, until)


def _cell(job: dict, place: Job, side: str, user: int, work: str, ends: dict[int, int], given: tuple[int, ...] = ()) -> Cell:
    modules = place.file(f"{side}.modules", job["modules"][side], user)
    folder = place.folder(work, user), os.path.join(place.path, work)
    try:
        return Cell(job, user, [*job["python"], "-c", job["starts"][side]], {**ends, 6: modules}, folder, given)
    finally:
        os.close(modules)


def _watched(job: dict, cells: list[Cell], pipes: dict[str, int], until: float) -> dict:
    watch = Watch(job["limits"], cells, pipes, job["level"] != "none")
    try:
        why = watch.until(until)
    finally:
        watch.close()
        for cell in cells:
            os.close(cell.folder)
    if watch.problem:
        return {"why": "jail", "problem": watch.problem}
    return {"why": why, "code": watch.code, **{name: data.decode("utf-8", "replace") for name, data in watch.out.items()}}


def results_of(job: dict, place: Job, started: float) -> list[dict]:
    if "inputs" not in job:
        return [functions(job, place, started + job["seconds"])]
    results = []
    for given in job["inputs"]:
        results.append(program(job, place, time.monotonic() + job["seconds"], given))
        try:
            place.clear()  # what one run leaves, the next does not find
        except OSError as error:
            results[-1] = {**results[-1], "why": "left", "stderr": f"{error}"}
            break
        if results[-1]["why"] == "jail" or (job["first_only"] and results[-1]["why"] != "ended"):
            break
    return results


def stop(*_) -> None:
    """Ends the job and leaves nothing behind: the run is over, or no longer wants it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


def main() -> None:
    signal.signal(signal.SIGTERM, stop)
    control(PR_SET_PDEATHSIG, signal.SIGTERM)
    job = marshal.load(sys.stdin.buffer)
    if os.getppid() != job["parent"]:
        return
    control(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if job["level"] != "none" and (MACHINE not in ARCHITECTURES or not landlock.version()):
        tell({"why": "jail", "problem": f"no Landlock, or unknown system calls ({MACHINE})"})
        return
    started = time.monotonic()
    place = None
    try:
        place = Job(job["folder"])
        if "shell" in job:
            shell.serve(job, place)
            return
        results = results_of(job, place, started)
    except Exception as error:
        results = [{"why": "jail", "problem": f"{type(error).__name__}: {error}"}]
    finally:
        reap([])
        if place is not None:
            with suppress(OSError, RecursionError):
                place.clear()
    tell({"results": results, "s": time.monotonic() - started})


def tell(told: dict) -> None:
    marshal.dump(told, sys.stdout.buffer)
