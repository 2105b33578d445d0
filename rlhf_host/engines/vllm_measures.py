"""Measurements of vLLM while it is stepped, taken from its own parts, because its statistics come only with its logging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_host.records.tensors import Metric


class Measures:
    """Measurements of one engine."""

    def __init__(self) -> None:
        self.sampled = 0
        """Number of sampled tokens, including those of unfinished answers."""
        self._kv_use, self._preemptions, self._reported = 0.0, 0, 0
        """Largest share of the cache in use since ``metrics``; preemptions so far, and those that ``metrics`` has returned."""

    def metrics(self) -> Sequence[Metric]:
        (kv_use, self._kv_use), preemptions = (self._kv_use, 0.0), self._preemptions
        count, self._reported = preemptions - self._reported, preemptions
        return Metric("kv_use", kv_use, reduce="max"), Metric("preemptions", count, reduce="sum")

    def watch_outputs(self, processor: Any) -> None:
        """Counts the tokens that come from vLLM's core, wherever that runs."""
        process = processor.process_outputs

        def counted(outputs: Any, *arguments: Any, **named: Any) -> Any:
            self.sampled += sum(len(output.new_token_ids) for output in outputs)
            return process(outputs, *arguments, **named)

        processor.process_outputs = counted

    def watch_cache(self, scheduler: Any) -> None:
        """Notes the use of the cache after each scheduling decision."""
        schedule = scheduler.schedule

        def watched(*arguments: Any) -> Any:
            by_sync = len(scheduler.reset_preempted_req_ids)  # these did not lack room
            decision = schedule(*arguments)
            self._preemptions += len(decision.preempted_req_ids or ()) - by_sync
            self._kv_use = max(self._kv_use, scheduler.kv_cache_manager.usage)
            return decision

        scheduler.schedule = watched
