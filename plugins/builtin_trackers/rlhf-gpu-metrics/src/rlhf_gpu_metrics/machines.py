"""The GPUs of all machines of a Ray cluster: a watching actor on each."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from rlhf_gpu_metrics.watch import Devices, Watch
from rlhf_host import UserError

log = logging.getLogger(__name__)

ANSWER_S = 60.0
"""Longest time for the watchers to come up, or to answer."""


class Watcher:
    """Watches the GPUs of the machine that it is on."""

    def start(self, machine: str, every_s: float) -> str:
        """Returns why there is nothing to watch; an empty text if there is."""
        self._machine = machine
        try:
            # Ray hides GPUs from an actor that takes none; NVML shows all of the machine.
            self._watch = Watch(Devices(), every_s)
        except UserError as error:
            return str(error)
        return ""

    def take(self) -> dict[str, float]:
        return self._watch.take(f"{self._machine}:")


class Machines:
    """The watchers of a cluster that this process has joined, by the machines' addresses."""

    def __init__(self, every_s: float):
        self._every_s = every_s
        self._watchers: dict[str, Any] = {}
        self._without: dict[str, str] = {}
        """Address of a machine → why it is not watched."""

    def look(self) -> int:
        """Sends watchers to machines that are new; returns how many machines are watched."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = {node["NodeManagerAddress"]: node for node in ray.nodes() if node["Alive"]}
        names = Counter(node["NodeManagerHostname"] for node in nodes.values())
        for gone in (self._watchers.keys() | self._without.keys()) - nodes.keys():
            self._watchers.pop(gone, None)
            self._without.pop(gone, None)
        asked = {}
        for address in sorted(nodes.keys() - self._watchers.keys() - self._without.keys()):
            name = nodes[address]["NodeManagerHostname"]
            place = NodeAffinitySchedulingStrategy(nodes[address]["NodeID"], soft=False)
            actor: Any = ray.remote(Watcher)
            watcher = actor.options(num_cpus=0, scheduling_strategy=place).remote()
            asked[address] = (watcher, watcher.start.remote(name if names[name] == 1 else address, self._every_s))
        for address, (watcher, answer) in asked.items():
            try:
                problem = ray.get(answer, timeout=ANSWER_S)
            except ray.exceptions.RayError as error:
                problem = _said(error)
            if problem:
                self._without[address] = f"{address}: {problem}"
                ray.kill(watcher)
            else:
                self._watchers[address] = watcher
        return len(self._watchers)

    def reasons(self) -> str:
        return "; ".join(self._without.values()) or "it has no machine"

    def take(self) -> dict[str, float]:
        """Returns metric → value of all machines since the last call. One that does not answer is left out, with a warning."""
        import ray

        self.look()
        asked = {address: watcher.take.remote() for address, watcher in self._watchers.items()}
        values: dict[str, float] = {}
        for address, answer in asked.items():
            try:
                values |= ray.get(answer, timeout=ANSWER_S)
            except ray.exceptions.RayError as error:
                log.warning("gpu_metrics: machine %s does not answer, and is left out from now on: %s", address, _said(error))
                self._without[address] = _said(error)
                del self._watchers[address]
        return values

    def close(self) -> None:
        import ray

        for watcher in self._watchers.values():
            if ray.is_initialized():
                ray.kill(watcher)
        self._watchers = {}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
