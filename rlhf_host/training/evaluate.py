"""Evaluation: sampled rewards, pass@k, lengths and truncation, overall and per data source."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_host.config.schema import EvalConfig
from rlhf_host.data.stream import Draw
from rlhf_host.phases import phase
from rlhf_host.records.episodes import Task, Trajectory
from rlhf_host.records.metric_names import RowMetrics
from rlhf_host.records.needs import RoleHandle, ScoreContext
from rlhf_host.rollouts.collect import Collected, Collector
from rlhf_host.rollouts.experience import row_means
from rlhf_host.rollouts.summary import summary


@dataclass(slots=True)
class Evaluation:
    """A set of tasks and how to sample and score them."""

    tasks: Sequence[Task]
    collector: Collector
    settings: EvalConfig
    handles: Mapping[str, RoleHandle]
    tokenizer: Any
    row_metrics: RowMetrics = field(default_factory=RowMetrics)

    async def run(self, step: int) -> tuple[dict[str, float], list[Trajectory]]:
        """Returns metrics under ``eval/`` and all trajectories, unjudged ones included. Raises ``RunError`` if too many
        trajectories could not be judged.
        """
        phase(f"Evaluating {len(self.tasks)} tasks × {self.settings.n} samples")
        started = time.perf_counter()
        collected = Collected()
        context = ScoreContext("eval", step, self.handles, self.tokenizer)
        await self.collector.run([Draw(task, 0) for task in self.tasks], context, collected)
        rows = collected.trajectories_in_order()
        metrics = {f"eval/{name}": value for name, value in self._summary(rows).items()}
        sources = {row.task.source for row in rows}
        scored = "eval/score/mean" in metrics
        for source in sorted(sources) if len(sources) > 1 else ():
            own = [row for row in rows if row.task.source == source]
            metrics |= {f"eval/{source}/{name}": value for name, value in self._summary(own, scored=scored).items()}
        metrics["time/eval"] = time.perf_counter() - started
        return metrics, rows

    def _summary(self, rows: Sequence[Trajectory], *, scored: bool = False) -> dict[str, float]:
        measured = row_means(row for row in rows if row.final and row.reward is not None)
        return self.row_metrics.merged_with(summary(rows, self.settings, scored=scored), measured)
