"""Costs of each hook of a plugin: time and memory per call, at the sizes of a real run, on the CPU."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhf_authoring.calls import Call, Calls, Unfit
from rlhf_authoring.contracts.session import running
from rlhf_authoring.contracts.subject import Broken, Subject
from rlhf_host import RunError, UserError

FEWEST, MOST, ENOUGH_S = 3, 50, 2.0
"""Calls that are timed: at least, at most, and no more once so much time has passed."""
NOT_ALONE = ("check_run", "run_started", "run_finished")


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs of one hook. Without ``problem``, ``median_s`` and ``peak_bytes`` are there."""

    hook: str
    size: str = ""
    """Size of what one call was given."""
    median_s: float | None = None
    peak_bytes: int | None = None
    """Most memory held at once beyond what was there before the call: tensors and Python objects, of this process alone."""
    calls: int = 0
    problem: str = ""
    """The reason why it was not measured."""


def bench(subject: Subject, *, rows: int | None = None, tokens: int = 1024) -> Iterator[Cost]:
    """The cost of every hook the plugin implements, in the order of the contract.

    Args:
        subject: the plugin, with its options.
        rows: trajectories of a batch or of what is judged; default: 1024 for batches, 512 for rewards, agents and trackers.
        tokens: longest completion of a batch.
    """
    subject.deadline_s = 600.0
    with tempfile.TemporaryDirectory(prefix="rlhf-bench-") as folder, running(subject, run_dir=Path(folder)) as session:
        calls = Calls(session, rows or 1024, rows or 512, tokens)
        for hook in session.manager.hooks(subject.key):
            if hook in NOT_ALONE:
                yield Cost(hook, problem="needs a run")
                continue
            try:
                yield from map(_cost, calls.of(hook))
            except (RunError, UserError, Broken, ValueError) as error:
                yield Cost(hook, problem=f"failed: {' '.join(str(error).split())}")
            except Unfit as error:
                yield Cost(hook, problem=str(error))


def _cost(call: Call) -> Cost:
    call.run(call.prepare())  # warms up
    times: list[float] = []
    while len(times) < FEWEST or (len(times) < MOST and sum(times) < ENOUGH_S):
        arguments = call.prepare()
        start = time.perf_counter()
        call.run(arguments)
        times.append(time.perf_counter() - start)
    return Cost(call.name, call.size, statistics.median(times), object_bytes(call) + tensor_bytes(call), len(times))


def object_bytes(call: Call) -> int:
    """Most bytes of Python objects, of all threads, that the call holds at once."""
    arguments = call.prepare()
    tracemalloc.start()
    try:
        call.run(arguments)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def tensor_bytes(call: Call) -> int:
    """Most bytes of CPU tensors, allocated by this thread, that the call holds at once."""
    from torch.profiler import ProfilerActivity, profile

    arguments = call.prepare()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call.run(arguments)
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes, initial=0))
