"""Figures of evaluated trajectories: rewards, scores and pass@k with their errors, and how many failed or are unjudged."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from statistics import fmean

from rlhf_host.config.schema import EvalConfig
from rlhf_host.records.episodes import Trajectory


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Returns ``1 − C(n−c, k)/C(n, k)``, the chance that one of ``k`` of the samples passes (Chen et al., arXiv:2107.03374, eq.
    1).
    """
    if k > samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {samples}")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def summary(rows: Sequence[Trajectory], settings: EvalConfig, *, scored: bool = False) -> dict[str, float]:
    """Returns the metrics of final trajectories: their number ``samples``, of which ``failed`` episodes and ``unjudged`` answers;
    ``reward/mean``, ``reward/NAME`` of each of several plugins, ``length/mean`` and ``truncated`` of the judged ones;
    ``score/mean`` and ``pass@k``, where a failed episode counts as wrong.

    Rewards, scores and pass@k have ``NAME/stderr`` too: the standard error over tasks, because samples of one task are not
    independent. Where answers are unjudged, scores and pass@k have ``NAME/low`` and ``NAME/high``: these answers counted as wrong,
    and as right.

    Args:
        scored: rewards are known to give scores, by rows of other sources.
    """
    rows = [row for row in rows if row.final]
    judged = [row for row in rows if row.reward is not None]
    failed = {row.episode_id for row in rows if row.failed}
    values = {
        "samples": float(len(rows)),
        "failed": float(len(failed)),
        "failed/share": len(failed) / max(1, len({row.episode_id for row in rows})),
        "unjudged": float(sum(row.reward is None and not row.failed for row in rows)),
    }
    if not judged:
        return values | _successes(rows, settings, scored=scored)
    values |= {
        "reward/mean": fmean(row.reward or 0.0 for row in judged),
        "length/mean": fmean(row.action_length for row in judged),
        "truncated": fmean(row.truncated for row in judged),
    }
    names = {name for row in judged for name in row.rewards}
    for name in sorted(names) if len(names) > 1 else ():
        if totals := [reward.total for row in judged if (reward := row.rewards.get(name)) is not None]:
            values[f"reward/{name}"] = fmean(totals)
    values |= _with_error("reward", [fmean(row.reward or 0.0 for row in each) for each in _by_task(judged)])
    return values | _successes(rows, settings, scored=scored)


def _successes(rows: Sequence[Trajectory], settings: EvalConfig, *, scored: bool) -> dict[str, float]:
    """Returns ``score/mean`` and ``pass@k`` over sources whose rewards give a score."""
    sources = {row.task.source for row in rows if row.score is not None}
    without = {row.task.source for row in rows if row.reward is not None} - sources
    if not sources and (without or not scored or not any(row.failed for row in rows)):
        return {}
    tasks = _by_task([row for row in rows if row.task.source not in without])
    known = [[score for row in answers if (score := 0.0 if row.failed else row.score) is not None] for answers in tasks]
    values = {"score/mean": fmean(score for scores in known for score in scores)}
    values |= _with_error("score", [fmean(scores) for scores in known if scores])
    if open_answers := sum(map(len, tasks)) - sum(map(len, known)):
        total, among = sum(map(sum, known)), sum(map(len, tasks))
        values |= {"score/low": total / among, "score/high": (total + open_answers) / among}
    groups = list(_by_role(tasks))
    for k in sorted({1, settings.n, *settings.k}):
        # A group short of k answers that are known has no unbiased estimate, and is left out of this k.
        passes = [pass_at_k(known, passed, k) for known, passed, _ in groups if known >= k]
        if not passes:
            continue
        name, mean = f"pass@{k}", fmean(passes)
        values |= {name: mean} | _with_error(name, passes)
        if open_answers:
            whole = [(known + unknown, passed, unknown) for known, passed, unknown in groups if known + unknown >= k]
            values[f"{name}/low"] = min(mean, fmean(pass_at_k(count, passed, k) for count, passed, _ in whole))
            values[f"{name}/high"] = max(mean, fmean(pass_at_k(count, passed + more, k) for count, passed, more in whole))
    return values


def _by_task(rows: Sequence[Trajectory]) -> list[list[Trajectory]]:
    tasks: dict[str, list[Trajectory]] = {}
    for row in rows:
        tasks.setdefault(row.group_id, []).append(row)
    return list(tasks.values())


def _by_role(tasks: Sequence[Sequence[Trajectory]]) -> Iterator[tuple[int, int, int]]:
    """Yields how many answers of each task and role are known, passed, and unjudged. A failed episode is a known answer of every
    role.
    """
    for answers in tasks:
        failed = sum(row.failed for row in answers)
        for role in {row.role for row in answers if not row.failed} or {""}:
            scores = [row.score for row in answers if row.role == role and not row.failed]
            passed = sum(score is not None and score >= 1.0 for score in scores)
            yield failed + len(scores) - scores.count(None), passed, scores.count(None)


def _with_error(name: str, tasks: Sequence[float]) -> dict[str, float]:
    """Returns a mean over tasks with its standard error; for one task there is no error."""
    return {f"{name}/stderr": statistics.stdev(tasks) / math.sqrt(len(tasks))} if len(tasks) > 1 else {}
