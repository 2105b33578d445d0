"""What a reading of the port gives: the run's state, and the last values of its metrics."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rlhf_host import RunContext, __version__
from rlhf_host.trackers import readable
from rlhf_tracker_prometheus.families import FAMILIES, OTHER, OTHER_EVAL, PREFIX, Family, found

STATES = ("running", "finished", "interrupted", "failed")

Values: TypeAlias = dict[tuple[Family, tuple[str, ...]], float]

STEPS = Family("", "steps", "Steps that this process has trained.", counts=True)
ENDS = ("finished", "truncated", "failed")


class Exported(Collector):
    """The metrics of one run. The run writes them, and threads that answer requests read them.

    A gauge has the value of the last step, or of the last evaluation: what the last step did not measure is not there. Counters
    count from the start of this process, as those of Prometheus do.
    """

    def __init__(self, run: str, context: RunContext):
        self.run, self._roles = _text(run), {"actor", *context.roles}
        self._known: dict[str, tuple[Family, tuple[str, ...]]] = {}
        """Metrics that the run has had."""
        self._lock = threading.Lock()
        self._state = "running"
        self._began = self._last = time.time()
        self._step, self._planned = max(context.resume_step, 0), context.steps
        self._evaluated: int | None = None
        self._of_step: Values = {}
        self._of_eval: Values = {}
        self._counted: Values = {(STEPS, ()): 0.0}
        for family in FAMILIES:
            if family.counts and len(family.labels) == 1:
                self._counted[family, ()] = 0.0
        for end in ENDS:
            self._counted[found(f"rollout/{end}", ())] = 0.0
        self._about = _about(context)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step, or those of the evaluation before the first."""
        of_step: Values = {}
        of_eval: Values = {}
        counted: Values = {}
        for name, value in metrics.items():
            if (key := self._known.get(name)) is None:
                key = self._known[name] = found(_text(name), self._roles)
            family, labels = key
            values = counted if family.counts else of_eval if name.startswith("eval/") else of_step
            if (family, labels) in values or (family.counts and not 0 <= value < math.inf):
                # One of two names that would be the same, or what would spoil a counter for good.
                values = of_eval if values is of_eval else of_step
                family, labels = (OTHER_EVAL if values is of_eval else OTHER), (_text(name),)
            values[family, labels] = value * family.scale
        with self._lock:
            self._last, self._step, self._of_step = time.time(), step, of_step
            if of_eval:
                self._of_eval, self._evaluated = of_eval, step
            for key, value in counted.items():
                self._counted[key] = self._counted.get(key, 0.0) + value
            self._counted[STEPS, ()] += step > 0

    def end(self, status: str) -> None:
        with self._lock:
            self._state = status

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            yield from (*self._of_run(), *_families(self.run, {**self._of_step, **self._of_eval, **self._counted}))

    def _of_run(self) -> Iterator[Metric]:
        run = (self.run,)

        def gauge(name: str, about: str, value: float) -> Metric:
            return _gauge(name, about, ("run",), [(run, value)])

        yield _gauge("run_info", "What the run is.", ("run", *self._about), [((*run, *self._about.values()), 1.0)])
        states = [((*run, state), float(state == self._state)) for state in STATES]
        yield _gauge("run_state", "1 for the state that the run is in.", ("run", "state"), states)
        yield gauge("run_start_timestamp_seconds", "When this process began the run, or went on with it.", self._began)
        yield gauge(
            "last_step_timestamp_seconds", "When the last step ended; before the first, when the run began.", self._last
        )
        yield gauge("step", "Number of the last step, 0 before the first.", self._step)
        if self._planned is not None:
            yield gauge("planned_steps", "Steps of the whole run.", self._planned)
        if self._evaluated is not None:
            yield gauge("last_eval_step", "Step of the last evaluation.", self._evaluated)


def _families(run: str, values: Values) -> Iterator[Metric]:
    samples: dict[Family, list[tuple[Sequence[str], float]]] = {}
    for (family, labels), value in values.items():
        samples.setdefault(family, []).append(((run, *labels), value))
    for family, each in samples.items():
        if family.counts:
            counter = CounterMetricFamily(PREFIX + family.name, family.help, labels=family.labels)
            for own, count in each:
                counter.add_metric(own, count)
            yield counter
        else:
            yield _gauge(family.name, family.help, family.labels, each)


def _gauge(name: str, about: str, names: Sequence[str], samples: Sequence[tuple[Sequence[str], float]]) -> Metric:
    gauge = GaugeMetricFamily(PREFIX + name, about, labels=names)
    for labels, value in samples:
        gauge.add_metric(labels, value)
    return gauge


def _text(value: Any) -> str:
    """Returns a text that can be written as UTF-8."""
    return str(readable(str(value)))


def _about(context: RunContext) -> dict[str, str]:
    """Returns label → value of what a run is, as far as its configuration says."""
    config = context.config
    chosen = {kind: (config.get(kind) or {}).get("name") for kind in ("algo", "engine", "backend", "runtime")}
    model = ((config.get("roles") or {}).get("actor") or {}).get("model")
    return {name: _text(value or "") for name, value in {"version": __version__, "model": model, **chosen}.items()}
