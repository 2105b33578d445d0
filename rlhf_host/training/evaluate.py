"""Evaluation: sampled rewards, pass@k, lengths and truncation, overall and per data source."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_host.config.schema import EvalConfig
from rlhf_host.data.stream import Draw
from rlhf_host.phases import phase
from rlhf_host.records.episodes import Group, Task, Trajectory
from rlhf_host.records.metric_names import RowMetrics
from rlhf_host.records.needs import RoleHandle, ScoreContext
from rlhf_host.rollouts.collect import Collected, Collector
from rlhf_host.rollouts.experience import row_means


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Returns ``1 − C(n−c, k)/C(n, k)``, the chance that one of ``k`` of the samples passes (Chen et al., arXiv:2107.03374, eq.
    1).
    """
    if k > samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {samples}")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


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
        metrics = {f"eval/{name}": value for name, value in self._summary(collected.groups).items()}
        sources = {group.task.source for group in collected.groups}
        if len(sources) > 1:
            for source in sorted(sources):
                groups = [group for group in collected.groups if group.task.source == source]
                metrics |= {f"eval/{source}/{name}": value for name, value in self._summary(groups).items()}
        metrics |= {"eval/unjudged": float(collected.unjudged.total()), "eval/failed": float(collected.failed.total())}
        metrics["time/eval"] = time.perf_counter() - started
        return metrics, collected.trajectories_in_order()

    def _summary(self, groups: Sequence[Group]) -> dict[str, float]:
        measured = row_means(row for group in groups for row in group.trajectories if row.final)
        return self.row_metrics.merged_with(summary(groups, self.settings), measured)


def summary(groups: Sequence[Group], settings: EvalConfig) -> dict[str, float]:
    """Returns the metrics of judged final trajectories: ``reward/mean``, ``reward/NAME`` of each of several plugins,
    ``score/mean``, ``pass@k``, ``length/mean``, ``truncated``, ``samples``. Rewards, scores and pass@k have ``NAME/stderr``
    too: the standard error over tasks, because samples of one task are not independent.
    """
    judged: dict[tuple[str, str], list[Trajectory]] = {}
    for group in groups:
        for row in group.trajectories:
            if row.final:
                judged.setdefault((group.group_id, row.role), []).append(row)
    rows = [row for answers in judged.values() for row in answers]
    if not rows:
        return {"samples": 0.0}

    def mean(numbers: Sequence[float]) -> float:
        return sum(numbers) / len(numbers)

    values = {
        "reward/mean": mean([row.reward or 0.0 for row in rows]),
        "length/mean": mean([float(row.action_length) for row in rows]),
        "truncated": mean([float(row.truncated) for row in rows]),
        "samples": float(len(rows)),
    }
    names = {name for row in rows for name in row.rewards}
    for name in sorted(names) if len(names) > 1 else ():
        if totals := [reward.total for row in rows if (reward := row.rewards.get(name)) is not None]:
            values[f"reward/{name}"] = mean(totals)
    tasks: dict[str, list[Trajectory]] = {}
    for (group_id, _), answers in judged.items():
        tasks.setdefault(group_id, []).extend(answers)
    values |= _with_error("reward", [mean([row.reward or 0.0 for row in answers]) for answers in tasks.values()])
    scores = [row.score for row in rows if row.score is not None]
    if scores:
        values["score/mean"] = mean(scores)
        scored = ([row.score for row in answers if row.score is not None] for answers in tasks.values())
        values |= _with_error("score", [mean(each) for each in scored if each])
        for k in sorted({1, settings.n, *settings.k}):
            # A group short of k judged samples has no unbiased estimate, and is left out of this k.
            counted = [answers for answers in judged.values() if len(answers) >= k]
            if counted:
                passes = [pass_at_k(len(answers), _passed(answers), k) for answers in counted]
                values |= {f"pass@{k}": mean(passes)} | _with_error(f"pass@{k}", passes)
    return values


def _with_error(name: str, tasks: Sequence[float]) -> dict[str, float]:
    """Returns a mean over tasks with its standard error; for one task there is no error."""
    return {f"{name}/stderr": statistics.stdev(tasks) / math.sqrt(len(tasks))} if len(tasks) > 1 else {}


def _passed(answers: Sequence[Trajectory]) -> int:
    return sum(row.score is not None and row.score >= 1.0 for row in answers)
