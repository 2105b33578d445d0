"""The rules of the trace event format, as far as a timeline uses it."""

from __future__ import annotations


def refuse_broken(trace):
    """Raises for what the trace event format does not allow: events without names, of threads that nobody named, that overlap."""
    named = {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["name"] == "thread_name"}
    processes = {event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    threads: dict[tuple[int, int], list[tuple[float, float, str]]] = {}
    for event in trace["traceEvents"]:
        assert event["pid"] in processes
        if event["ph"] == "M":
            assert event["args"]
            continue
        assert event["ph"] == "X"
        assert event["name"]
        assert event["cat"]
        assert (event["pid"], event["tid"]) in named
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        tenths = round(event["ts"] * 10), round((event["ts"] + event["dur"]) * 10)
        threads.setdefault((event["pid"], event["tid"]), []).append((*tenths, event["name"]))
    for events in threads.values():
        assert [begun for begun, _, _ in events] == sorted(begun for begun, _, _ in events)
        open_ends: list[float] = []
        for begun, ended, name in events:
            while open_ends and open_ends[-1] <= begun:
                open_ends.pop()
            assert not open_ends or ended <= open_ends[-1], f"{name} overlaps"
            open_ends.append(ended)
    return threads
