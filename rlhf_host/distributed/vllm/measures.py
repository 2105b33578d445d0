"""Measurements of vLLM, from what its core sends with the tokens of a step, wherever it runs."""

from __future__ import annotations

import contextlib
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_host.records.tensors import Metric


class Measures:
    """Measurements of one engine."""

    def __init__(self) -> None:
        self.sampled = 0
        """Number of sampled tokens, including those of unfinished answers."""
        self._kv_use, self._preemptions, self._reported = 0.0, 0, 0
        """Largest share of the cache in use since ``metrics``; preemptions so far, and those that ``metrics`` has returned."""
        self._emptied: list[float] = []
        """Times at which ``emptying`` began and ended, one after the other."""

    def metrics(self) -> Sequence[Metric]:
        (kv_use, self._kv_use), preemptions = (self._kv_use, 0.0), self._preemptions
        count, self._reported = preemptions - self._reported, preemptions
        return Metric("kv_use", kv_use, reduce="max"), Metric("preemptions", count, reduce="sum")

    def watch(self, core: Any) -> None:
        """Reads everything that comes from vLLM's core. Its client must have been started with statistics."""
        from vllm.v1.engine import EngineCoreEventType

        get_output, preempted = core.get_output, EngineCoreEventType.PREEMPTED

        def watched() -> Any:
            step = get_output()
            for output in step.outputs:
                self.sampled += len(output.new_token_ids)
                self._preemptions += sum(
                    event.type == preempted and not self._by_emptying(event.timestamp) for event in output.events or ()
                )
            if step.scheduler_stats is not None:
                self._kv_use = max(self._kv_use, step.scheduler_stats.kv_cache_usage)
            return step

        core.get_output = watched

    @contextlib.contextmanager
    def emptying(self) -> Iterator[None]:
        """Does not count requests that vLLM preempts inside: these did not lack room."""
        self._emptied.append(time.monotonic())
        try:
            yield
        finally:
            self._emptied.append(time.monotonic())

    def _by_emptying(self, timestamp: float) -> bool:
        """Returns True for a time inside ``emptying``. A machine's processes share this clock, and vLLM's core is on this one."""
        return bisect(self._emptied, timestamp) % 2 == 1
