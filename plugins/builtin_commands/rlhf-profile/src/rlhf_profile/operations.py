"""Operations of torch's profiler with the time that they took themselves, without those inside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Event(NamedTuple):
    """An operation on one thread, or a kernel on one stream of a GPU."""

    place: tuple[int, int]
    began: int
    ended: int
    name: str


def self_times(events: Iterable[Event]) -> dict[str, tuple[int, int]]:
    """Returns, by name, the time of the events themselves and their number. Events of one place nest, or follow one another."""
    times: dict[str, int] = defaultdict(int)
    counts: dict[str, int] = defaultdict(int)
    open_events: list[Event] = []
    for event in sorted(events, key=lambda each: (each.place, each.began, -each.ended)):
        while open_events and (open_events[-1].place != event.place or open_events[-1].ended <= event.began):
            open_events.pop()
        if open_events:
            times[open_events[-1].name] -= min(event.ended, open_events[-1].ended) - event.began
        times[event.name] += event.ended - event.began
        counts[event.name] += 1
        open_events.append(event)
    return {name: (time, counts[name]) for name, time in times.items()}


def of_profiler(profiler: Any) -> list[dict[str, Any]]:
    """Returns the operations of a profiler that has stopped, the longest first: name, ``cpu`` or the kind of device, seconds,
    calls."""
    result = profiler.profiler.kineto_results
    by_device: dict[str, list[Event]] = defaultdict(list)
    for event in result.events():
        if event.is_user_annotation() or event.is_python_function() or event.is_hidden_event():
            continue
        device = str(event.device_type()).rpartition(".")[2].lower()
        place = (event.start_thread_id(), 0) if device == "cpu" else (event.device_index(), event.device_resource_id())
        if event.duration_ns() > 0:
            by_device[device].append(Event(place, event.start_ns(), event.end_ns(), event.name()))
    rows = [
        {"name": name, "device": device, "seconds": time / 1e9, "calls": count}
        for device, events in by_device.items()
        for name, (time, count) in self_times(events).items()
    ]
    return sorted(rows, key=lambda row: -float(row["seconds"]))


def together(lists: Iterable[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the sums of several processes' or steps' operations, the longest first."""
    sums: dict[tuple[str, str], tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for row in (row for rows in lists for row in rows):
        seconds, calls = sums[row["device"], row["name"]]
        sums[row["device"], row["name"]] = seconds + row["seconds"], calls + row["calls"]
    rows = [{"name": name, "device": device, "seconds": own[0], "calls": own[1]} for (device, name), own in sums.items()]
    return sorted(rows, key=lambda row: -float(row["seconds"]))
