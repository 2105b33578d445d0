"""Results of the runs: a value for each, means over seeds with their standard errors, and which settings matter."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_host import RunDirectory, UserError
from rlhf_host.commands import near_matches
from rlhf_host.runs import HEADLINES
from rlhf_sweep.folder import Folder
from rlhf_sweep.planned import Planned, told
from rlhf_sweep.samplers import key
from rlhf_sweep.space import label

QUARTER = 0.75
"""Metrics of training are means over the steps after this share of a run: one step is too noisy to choose by."""
CLEAR = (12.7, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Standard errors that two means must be apart to be called different, by degrees of freedom from 1: Student's t at 95 %."""


@dataclass(frozen=True, slots=True)
class By:
    """The metric that settings are compared by."""

    name: str
    low: bool
    """A lower value is better."""

    @property
    def evaluated(self) -> bool:
        return self.name.startswith("eval/")

    def __str__(self) -> str:
        how = "at the last evaluation" if self.evaluated else "mean over the last quarter of the steps"
        return f"{self.name} ({how}; {'lower' if self.low else 'higher'} is better)"

    def of(self, run: RunDirectory) -> float | None:
        """Returns the run's value; None: it has no such metric."""
        steps, values = run.curves.get(self.name, ([], []))
        if not values:
            return None
        if self.evaluated:
            return values[-1]
        return statistics.fmean(
            value for step, value in zip(steps, values, strict=True) if step > QUARTER * steps[-1] or step == steps[-1]
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One combination of settings."""

    settings: dict[str, Any]
    values: tuple[float, ...]
    """Values of its finished runs."""
    planned: int
    failed: int
    names: tuple[str, ...]
    """Its finished runs."""

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def error(self) -> float | None:
        """Standard error of the mean over seeds."""
        return statistics.stdev(self.values) / math.sqrt(len(self.values)) if len(self.values) > 1 else None

    @property
    def told(self) -> str:
        return told(self.settings)


@dataclass(frozen=True, slots=True)
class Effect:
    """Share of the differences between runs that goes with one setting."""

    name: str
    share: float
    """Share of the variance of all finished runs: between its values, or of a range with its rank."""
    chance: float
    """Share that pure noise would give."""
    levels: tuple[tuple[str, float, int], ...]
    """Value, mean, number of runs; none for a range with a value for each run."""


def read_by(text: str | None) -> By | None:
    """Returns what ``--by NAME[:min|:max]`` means."""
    if text is None:
        return None
    match = re.fullmatch(r"(.+?)(?::(min|max))?", text)
    assert match is not None
    low = match[2] == "min" if match[2] else re.split(r"[/._]", match[1])[-1] == "loss"
    return By(match[1], low)


def usual_by(runs: Sequence[RunDirectory], best: str | None, best_mode: str) -> By | None:
    """Returns what runs are compared by when nobody says it: ``checkpoint.best``, else the first that all have of the host's
    list, evaluations before training. None: they have none in common."""
    for name in (best, *HEADLINES):
        if name is not None and runs and all(name in run.curves for run in runs):
            return By(name, best_mode == "min" if name == best else name.endswith("loss"))
    return None


class Results:
    """Results of the finished runs.

    Raises:
        UserError: ``by`` is a metric that a finished run does not have.
    """

    def __init__(self, folder: Folder, runs: Sequence[Planned], by: By | None):
        self.folder, self.planned = folder, list(runs)
        self.states = {run.name: folder.state(run.name) for run in runs}
        self.runs = {
            run.name: RunDirectory(folder.run_dir(run.name))
            for run in runs
            if self.states[run.name].get("status") == "finished"
        }
        config = runs[0].config.checkpoint if runs else None
        self.by = by or (usual_by([*self.runs.values()], config.best, config.best_mode) if config else None)
        if by is not None:
            for run in self.runs.values():
                if by.name not in run.curves:
                    raise UserError(f"--by {by.name}: {run.path} has no such metric{near_matches(by.name, run.curves)}")
        self.values = {name: value for name, run in self.runs.items() if self.by and (value := self.by.of(run)) is not None}
        self.rows = self._sorted(self._rows())

    @property
    def failed(self) -> list[tuple[str, str]]:
        return [(name, str(state.get("error"))) for name, state in self.states.items() if state.get("status") == "failed"]

    @property
    def left(self) -> list[str]:
        """Runs that have not ended."""
        return [name for name, state in self.states.items() if not state]

    def _rows(self) -> Iterable[Row]:
        groups: dict[Any, list[Planned]] = {}
        for run in self.planned:
            groups.setdefault(key(run.settings), []).append(run)
        for members in groups.values():
            ended = [run.name for run in members if run.name in self.values]
            yield Row(
                settings=members[0].settings,
                values=tuple(self.values[name] for name in ended),
                planned=len(members),
                failed=sum(self.states[run.name].get("status") == "failed" for run in members),
                names=tuple(ended),
            )

    def _sorted(self, rows: Iterable[Row]) -> list[Row]:
        """The best first; those without a value last."""
        sign = 1.0 if self.by and self.by.low else -1.0
        return sorted(rows, key=lambda row: (row.mean is None, 0.0 if row.mean is None else sign * row.mean))

    @property
    def whole(self) -> list[Row]:
        """Settings of which every run has finished: only these can be the best."""
        return [row for row in self.rows if len(row.values) == row.planned]

    def verdict(self) -> list[str]:
        """Returns which settings are the best, and how sure that is."""
        if not self.by:
            return ["No metric is in all finished runs: name one with --by."] if self.runs else []
        whole, lines = self.whole, []
        if not whole:
            return ["No settings have finished with all their runs: there is no best one yet."]
        best = whole[0]
        lines.append(f"Best: {best.told}: {number(best)} over {seeds(len(best.values))}")
        if best.error is None:
            lines.append(
                "There is one run of each: without a second seed nothing says how much of this is luck (--seeds 0..2)."
            )
        elif len(whole) > 1 and (second := whole[1]).mean is not None and second.error is not None and best.mean is not None:
            gap, noise = abs(best.mean - second.mean), math.hypot(best.error, second.error)
            freedom = len(best.values) + len(second.values) - 2
            limit = CLEAR[min(freedom, len(CLEAR)) - 1]
            sure = "more than noise" if gap > limit * noise else "within the noise: more seeds can tell them apart"
            lines.append(f"The next, {second.told}, is {gap:.3g} ± {noise:.2g} behind, which is {sure}.")
        if len(whole) > 2:
            lines.append(
                f"It is the best of {len(whole)}, chosen by the same numbers: expect a little less of it on new seeds and data."
            )
        varied = {name for run in self.planned for name in run.settings}
        if any(name.split(".")[0] in ("reward", "eval", "data") for name in varied):
            lines.append("Rewards, data or evaluation are varied: values on different ones are not comparable.")
        if "loss" in self.by.name and "algo" in {name.split(".")[0] for name in varied}:
            lines.append("Losses of different algorithms are not comparable: name another metric with --by.")
        return lines

    def effects(self) -> list[Effect]:
        """Returns what each varied setting explains, the strongest first."""
        runs = [run for run in self.planned if run.name in self.values]
        values = [self.values[run.name] for run in runs]
        found = []
        for name in dict.fromkeys(name for run in runs for name in run.settings):
            if (effect := _effect(name, [run.settings[name] for run in runs], values)) is not None:
                found.append(effect)
        return sorted(found, key=lambda each: -each.share)


def _effect(name: str, settings: Sequence[Any], values: Sequence[float]) -> Effect | None:
    groups: dict[str, list[float]] = {}
    for setting, value in zip(settings, values, strict=True):
        groups.setdefault(label(setting), []).append(value)
    count, whole = len(values), statistics.fmean(values) if values else 0.0
    spread = sum((value - whole) ** 2 for value in values)
    if len(groups) < 2 or not spread or count < 3:
        return None
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in settings)
    if len(groups) > count / 2 and numbers:  # drawn from a range
        share = statistics.correlation(_ranks(settings), _ranks(values)) ** 2
        return Effect(name, share, 1 / (count - 1), ())
    if len(groups) == count:
        return None
    between = sum(len(each) * (statistics.fmean(each) - whole) ** 2 for each in groups.values())
    levels = tuple((text, statistics.fmean(each), len(each)) for text, each in groups.items())
    return Effect(name, between / spread, (len(groups) - 1) / (count - 1), levels)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [(order.index(value) + len(order) - 1 - order[::-1].index(value)) / 2 for value in values]


def number(row: Row) -> str:
    """Returns mean and standard error."""
    if row.mean is None:
        return "-"
    return f"{row.mean:.4g}" + ("" if row.error is None else f" ± {row.error:.2g}")


def seeds(count: int) -> str:
    return f"{count} seed{'s' * (count != 1)}"


def summary(results: Results) -> Mapping[str, Any]:
    """Returns everything as plain values."""
    return {
        "by": None if results.by is None else {"metric": results.by.name, "better": "lower" if results.by.low else "higher"},
        "settings": [
            {
                "settings": row.settings,
                "mean": row.mean,
                "stderr": row.error,
                "values": list(row.values),
                "finished": len(row.values),
                "planned": row.planned,
                "failed": row.failed,
                "runs": [str(results.folder.run_dir(name)) for name in row.names],
            }
            for row in results.rows
        ],
        "effects": [{"setting": each.name, "share": each.share, "by_chance": each.chance} for each in results.effects()],
        "verdict": results.verdict(),
        "failed": [{"run": name, "error": error} for name, error in results.failed],
        "left": results.left,
    }
