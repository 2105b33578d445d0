"""Prediction of a run's seconds, kept under its settings, and the measurement beside it."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_host import RunDirectory, UserError, __version__
from rlhf_host.commands import write_file
from rlhf_host.internals import cache_directory
from rlhf_host.settings import RunConfig
from rlhf_plan.spans import Span, duration, short

FILE = "plan.json"
"""File of a run's directory with prediction and measurement."""
OTHER = ("name", "run_dir", "seed", "tracker", "trajectories", "checkpoint", "max_restarts")
"""Settings that change no second of a step."""
PARTS = ("sampling", "passes", "optimizer", "sync", "host")
MEASURED = {
    "sampling": ("time/rollout",),
    "passes and optimizer": ("time/logprobs", "time/train"),
    "sync": ("time/sync",),
}
"""Part → metrics with its seconds; the host's own are the rest of ``time/step``."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of a run."""

    parts: Mapping[str, Span]
    """Part of a step → its seconds."""
    steps: int
    evaluations: Span
    """Seconds of all evaluations."""
    devices: int
    device: str
    notes: Sequence[str]
    cpu: Span | None = None
    """CPU seconds of a step."""
    lengths: Span | None = None
    """Mean tokens of answers."""

    @property
    def step(self) -> Span:
        return Span.total(self.parts.values())

    @property
    def whole(self) -> Span:
        return Span.total([self.step.times(self.steps), self.evaluations])

    def lines(self, price: float | None) -> list[str]:
        """Returns the prediction for people; ``price``: of a device and hour."""
        parts = ", ".join(f"{part} {span.text(duration)}" for part, span in self.parts.items() if span.high)
        whole = f"{self.steps:,} steps: {self.whole.text(duration)}"
        if self.evaluations.high:
            whole += f", of which evaluations {self.evaluations.text(duration)}"
        if price is not None:
            of = "" if self.devices == 1 else f" for {self.devices} devices"
            cost = self.whole.times(price * self.devices / 3600)
            whole += f"; cost {cost.text(_money)}{of} at {price:g} per device and hour"
        where = f"Time on {self.device}:"
        return [where, f"  step {self.step.text(duration)}: {parts}", f"  {whole}", *(f"  - {note}" for note in self.notes)]

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"step": asdict(self.step), "whole": asdict(self.whole)}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Prediction:
        own = {name: found[name] for name in ("steps", "devices", "device", "notes")}
        spans = {name: None if found[name] is None else Span(**found[name]) for name in ("evaluations", "cpu", "lengths")}
        return cls(**own, **spans, parts={name: Span(**span) for name, span in found["parts"].items()})


def _money(value: float) -> str:
    if 0 < value < 0.01:
        return "below 0.01"
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def keep(config: RunConfig, prediction: Prediction) -> None:
    """Keeps it for runs with these settings. Raises ``UserError`` where the cache cannot be written."""
    path = _place(config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(prediction.json()).encode())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; set RLHF_CACHE to a directory that can be") from error


def kept(config: RunConfig) -> Prediction | None:
    """Returns the newest prediction for these settings, if there is one that can be read."""
    try:
        return Prediction.of_json(json.loads(_place(config).read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _place(config: RunConfig) -> Path:
    tree = config.model_dump(mode="json", by_alias=True)
    for name in OTHER:
        tree.pop(name, None)
    del tree["train"]["steps"]
    for data in (tree["data"], tree["eval"]["data"]):
        data.pop("day", None)  # a run sets it
    text = json.dumps([__version__, tree], sort_keys=True)
    return cache_directory() / "predictions" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def afterword(config: RunConfig) -> list[str]:
    """The entry point in the group ``rlhf.afterwords``: what the run took beside what was predicted."""
    if not (Path(str(config.run_dir)) / "metrics.jsonl").is_file():
        return []
    run = RunDirectory(str(config.run_dir))
    rows = [row for row in run.metrics if row["step"] and isinstance(row.get("time/step"), int | float)]
    if not rows:
        return []
    predicted = kept(config)
    lines = compared(rows, predicted)
    measured = {"step": _mean(rows, ("time/step",)), "whole": sum(row["time/step"] + row.get("time/eval", 0.0) for row in rows)}
    record = {"lines": lines, "measured": measured, "predicted": None if predicted is None else predicted.json()}
    write_file(run.path / FILE, json.dumps(record, indent=1).encode() + b"\n")
    return lines


def compared(rows: Sequence[Mapping[str, Any]], predicted: Prediction | None) -> list[str]:
    """Returns lines with the time of a run's steps, predicted and measured."""
    step = _mean(rows, ("time/step",))
    took = {part: _mean(rows, names) for part, names in MEASURED.items()}
    took["host"] = max(0.0, step - sum(took.values()))
    told = ", ".join(f"{part} {duration(seconds)}" for part, seconds in took.items() if seconds)
    measured = f"Time of a step, measured: {duration(step)} ({told})"
    if predicted is None:
        return [measured, "  not predicted: rlhf plan --time with the same settings, before a run, says what it will take"]
    spans = dict(predicted.parts)
    both = [spans.pop("passes"), spans.pop("optimizer")]
    spans = {"sampling": spans["sampling"], "passes and optimizer": Span.total(both), **spans}
    parts = ", ".join(f"{part} {span.text(duration)}" for part, span in spans.items() if span.high)
    place = "inside" if predicted.step.has(step) else "below" if step < predicted.step.low else "above"
    lines = [measured, f"  predicted for {predicted.device}: {predicted.step.text(duration)} ({parts}); measured is {place}"]
    lengths = [row["length/mean"] for row in rows if "length/mean" in row]
    if lengths and predicted.lengths is not None and not predicted.lengths.has(statistics.fmean(lengths)):
        lines.append(
            f"  answers had {short(statistics.fmean(lengths))} tokens at the mean, and were predicted to have"
            f" {predicted.lengths.text(short)}"
        )
    return lines


def _mean(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> float:
    return statistics.fmean(sum(row.get(name) or 0.0 for name in names) for row in rows)
