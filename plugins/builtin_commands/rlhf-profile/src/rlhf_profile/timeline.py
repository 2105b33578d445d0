"""The timeline of a step: spans of all processes on the controller's clock, as one file of Chrome's trace events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

KINDS = {
    "samples": ("generate",),
    "asks": ("request", "engine"),
    "scores": ("score",),
    "trains": ("pass", "forward", "backward", "losses", "optimizer", "statistics", "follow"),
    "computes": ("outputs",),
    "syncs": ("call", "sync"),
    "evaluates": ("evaluate",),
    "saves": ("checkpoint",),
    "hosts": ("rows", "logprobs", "advantages", "log", "hold", "rollout", "train", "step"),
}
"""What a process does → kinds of spans, which are first words of their names. The controller's own phases come last: in them it
mostly waits for others."""
DOES = {kind: does for does, kinds in KINDS.items() for kind in kinds}
OTHER = "works"
"""What a process does in a span of a package."""
COLOURS = {
    "samples": "thread_state_running",
    "asks": "thread_state_iowait",
    "scores": "thread_state_runnable",
    "trains": "rail_response",
    "computes": "rail_animation",
    "syncs": "rail_load",
    "waits": "grey",
}
SHORTEST_WAIT_NS = 200_000
"""Shorter pauses between two pieces of work are not called waiting."""
STEP = "step"


class Work(NamedTuple):
    """A span of a process, on the controller's clock."""

    number: int
    thread: str
    name: str
    began: int
    ended: int
    unfinished: bool = False

    @property
    def does(self) -> str:
        return DOES.get(self.name.split()[0].rstrip(","), OTHER)


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the run and its work in one step."""

    name: str
    host: str
    pid: int
    work: Sequence[Work]
    offset_ns: int = 0
    """Its clock minus the controller's."""
    uncertainty_ns: int = 0
    """Largest error of that."""

    @property
    def computes(self) -> str:
        """Name of the thread that computes with models; empty: none does."""
        threads = [own.thread for own in self.work if own.does in ("trains", "computes") or own.name == "generate"]
        return max(set(threads), key=threads.count) if threads else ""


@dataclass(slots=True)
class Shares:
    """Seconds of a process in one step, by what it does. A moment counts once in each of these."""

    name: str
    seconds: dict[str, float] = field(default_factory=dict)


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """Returns the length of the union of intervals."""
    total, reached = 0, None
    for began, ended in sorted(spans):
        if reached is None or began > reached:
            total, reached = total + ended - began, ended
        elif ended > reached:
            total, reached = total + ended - reached, ended
    return total


def gaps(spans: Iterable[tuple[int, int]], began: int, ended: int) -> list[tuple[int, int]]:
    """Returns the intervals between ``began`` and ``ended`` that none of the spans covers."""
    found, reached = [], began
    for first, last in sorted(spans):
        if first > reached:
            found.append((reached, min(first, ended)))
        reached = max(reached, last)
        if reached >= ended:
            return found
    return [*found, (reached, ended)]


def lanes(work: Sequence[Work]) -> list[list[Work]]:
    """Distributes the work of one thread over lanes, so that in each the spans nest: those of an event loop overlap."""
    found: list[list[Work]] = []
    open_ends: list[list[int]] = []
    for own in sorted(work, key=lambda each: (each.began, -each.ended)):
        for ends in open_ends:
            while ends and ends[-1] <= own.began:
                ends.pop()
        fits = (lane for lane, ends in enumerate(open_ends) if not ends or own.ended <= ends[-1])
        if (lane := next(fits, len(found))) == len(found):
            found.append([])
            open_ends.append([])
        found[lane].append(own)
        open_ends[lane].append(own.ended)
    return found


def step_of(controller: Process) -> tuple[int, int] | None:
    """Returns begin and end of the step on the controller's clock."""
    return next(((own.began, own.ended) for own in controller.work if own.name == STEP), None)


def phases(controller: Process) -> list[tuple[str, float]]:
    """Returns the parts of the step that the controller names, in order, with their seconds."""
    if (step := step_of(controller)) is None:
        return []
    thread = next(own.number for own in controller.work if own.name == STEP)
    inside = [own for own in controller.work if own.number == thread and step[0] <= own.began and own.ended <= step[1]]
    (top,) = lanes([own for own in inside if own.name != STEP and own.does in ("hosts", "syncs")])[:1] or [[]]
    parts, reached = [], step[0]
    for own in top:
        if own.began >= reached:
            parts.append((own.name, (own.ended - own.began) / 1e9))
            reached = own.ended
    return parts


def shares(processes: Sequence[Process], began: int, ended: int) -> list[Shares]:
    """Returns what each process did between two times, and how long its computing thread waited, or it had nothing to do."""
    found = []
    for process in processes:
        within = [(own, max(own.began, began), min(own.ended, ended)) for own in process.work]
        within = [(own, first, last) for own, first, last in within if last > first]
        does: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for own, first, last in within:
            does[own.does].append((first, last))
        does.pop("hosts", None)
        seconds = {name: covered(spans) / 1e9 for name, spans in does.items()}
        works = [
            (first, last)
            for own, first, last in within
            if own.does != "hosts" and (not process.computes or own.thread == process.computes)
        ]
        seconds["waits"] = (ended - began - covered(works)) / 1e9
        found.append(Shares(process.name, seconds))
    return found


def trace(processes: Sequence[Process], began: int, ended: int, about: dict[str, Any]) -> dict[str, Any]:
    """Returns the step in Chrome's trace event format, which Perfetto reads: complete events, in microseconds from its begin.

    Args:
        processes: the controller first.
        began: first moment that is shown.
        ended: last one.
        about: what the file says of itself.
    """
    events: list[dict[str, Any]] = []
    for pid, process in enumerate(processes, 1):
        named = f"{process.name} ({process.host}, pid {process.pid})"
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": named}})
        events.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
        tid = 0
        threads: dict[int, list[Work]] = defaultdict(list)
        for own in process.work:
            if own.ended > began and own.began < ended:
                threads[own.number].append(own)
        for number in sorted(threads, key=lambda each: threads[each][0].began):
            work = threads[number]
            for lane, spans in enumerate(lanes(work)):
                tid += 1
                label = work[0].thread if lane == 0 else f"{work[0].thread} ({lane + 1})"
                events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": label}})
                events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
                shown = [_event(pid, tid, own, began, ended) for own in spans]
                if lane == 0 and work[0].thread == process.computes:
                    idle = gaps(((own.began, own.ended) for own in spans), began, ended)
                    waits = [Work(number, "", "waits", *gap) for gap in idle if gap[1] - gap[0] >= SHORTEST_WAIT_NS]
                    shown += [_event(pid, tid, own, began, ended) for own in waits]
                events += sorted(shown, key=lambda event: (event["ts"], -event["dur"]))
    clocks = {
        process.name: {"offset_us": process.offset_ns / 1e3, "uncertainty_us": process.uncertainty_ns / 1e3}
        for process in processes
    }
    return {"displayTimeUnit": "ms", "otherData": {**about, "clocks": clocks}, "traceEvents": events}


def _event(pid: int, tid: int, own: Work, began: int, ended: int) -> dict[str, Any]:
    first, last = max(own.began, began), min(own.ended, ended)
    does = "waits" if own.name == "waits" else own.does
    event: dict[str, Any] = {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": own.name,
        "cat": does,
        # One rounding of both ends: spans that touch or nest still do.
        "ts": (first - began) // 100 / 10,
        "dur": ((last - began) // 100 - (first - began) // 100) / 10,
    }
    if does in COLOURS:
        event["cname"] = COLOURS[does]
    if own.unfinished or own.began < began or own.ended > ended:
        event["args"] = {"cut": "it goes on outside of what is shown"}
    return event
