"""The console tracker: lines about steps, a progress bar, and sometimes a few completions."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rlhf_host.errors import visible
from rlhf_host.hookspecs import hookimpl
from rlhf_host.records.episodes import Trajectory
from rlhf_host.records.figures import beside, failed_share, figure
from rlhf_host.records.needs import Outcome, RunContext
from rlhf_host.trackers.records import has_samples, numbers, reward_cell, sample_texts, setting, shorten, spread

COLUMNS: tuple[tuple[str, str, str, int], ...] = (
    ("kl", "kl", ".2g", 7),
    ("length", "length/mean", ".1f", 5),
    ("entropy", "entropy", ".3f", 5),
    ("s/step", "time/step", ".2f", 5),
    ("grad", "grad_norm", ".3g", 7),
    ("score", "score/mean", ".3f", 5),
    ("clip", "clip_fraction", ".1%", 5),
    ("loss", "loss", ".3g", 9),
    ("lr", "lr", ".2g", 7),
    ("mismatch", "mismatch/mean", ".1e", 7),
    ("tok/s", "tokens_per_s", ",.0f", 7),
)
"""Label, metric, format and usual width of the values in a step's line after the reward, most important first: a terminal shows
as many as fit. A metric that is absent is left out.
"""

_REMIND = 20
"""Number of steps before the same warning is shown again."""


class _Terminal(Terminal):
    def on_broken_pipe(self) -> None:
        """Stops output and lets the run go on when nobody reads any more, as after ``| head``."""
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()


class Console:
    """A line per step, a progress bar and samples: rich on a terminal, plain elsewhere, where fast steps do not all have a line.
    Model text is shown escaped, so it cannot control the terminal.
    """

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        every: PositiveInt = Field(10, description="steps between tables of sample completions; how many: trajectories.show")
        seconds: float = Field(
            5.0, ge=0, description="least time between lines of steps if output is not a terminal; 0: a line each"
        )
        width: PositiveInt = Field(240, ge=20, description="longest text in such a table, in characters")

    def __init__(self, options: Options):
        self.options = options
        self._terminal = _Terminal(highlight=False)
        self._progress: Progress | None = None
        self._steps = 0
        self._show = 2
        self._tokenizer: Any = None
        self._warned: dict[str, int] = {}
        self._told = -math.inf

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        # Made anew: the streams may have been replaced since the plugin was built.
        self._terminal = _Terminal(highlight=False)
        self._steps = context.steps or 0
        self._tokenizer = context.tokenizer
        self._show = setting(context.config, "show", 2)
        if context.run_dir is not None:
            again = f", resumed after step {max(context.resume_step, 0)}" if context.resumed else ""
            self._line(Text(visible(f"run directory: {context.run_dir}{again}"), "dim"))
        for notice in context.notices:
            self._line(Text(visible(notice), "dim"))
        if self._terminal.is_terminal:
            done = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            left = (TextColumn("ETA"), TimeRemainingColumn(elapsed_when_finished=False))
            # By default only the last 30 seconds count, and a step may take longer.
            self._progress = Progress(*done, *left, console=self._terminal, transient=True, speed_estimate_period=math.inf)
            self._progress.add_task("steps", total=self._steps or None, completed=max(context.resume_step, 0))
            self._progress.start()

    @hookimpl
    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        values = numbers(metrics)
        evaluation = {name: value for name, value in values.items() if name.startswith("eval/")}
        if (line := self._step_line(step, values)) and self._due(step, bool(evaluation)):
            self._line(line)
        if evaluation:
            self._line(self._eval_line(step, evaluation))
        self._warn(step, values)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step)

    @hookimpl
    def log_trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        if not (trajectories and self._show and has_samples(split, step, self.options.every)):
            return
        rows = [self._cells(trajectory) for trajectory in spread(trajectories, self._show)]
        if not self._terminal.is_terminal:
            for prompt, completion, label, reward in rows:
                # Escaped already.
                sample = f"prompt='{prompt}' completion='{completion}' label='{label}'" + (reward and f" reward={reward}")
                self._line(Text(f"  {split} sample: {sample}"))
            return
        table = Table(title=f"{split} samples, step {step}", title_justify="left", show_lines=True)
        for name in ("prompt", "completion", "label"):
            table.add_column(name, overflow="fold")
        table.add_column("reward", justify="right", no_wrap=True)
        for cells in rows:
            table.add_row(*(Text(cell) for cell in cells))
        self._terminal.print(table)

    @hookimpl
    def run_finished(self, outcome: Outcome) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        style = {"finished": "green", "interrupted": "yellow"}.get(outcome.status, "red")
        why = outcome.error or outcome.reason
        text = f"{outcome.status} after step {outcome.step}" + (f": {why}" if why else "")
        self._line(Text(visible(text), style))

    def _due(self, step: int, evaluated: bool) -> bool:
        """Returns True if the step has a line: on a terminal all have; elsewhere the last, evaluated ones, and one in a while."""
        now = time.monotonic()
        due = evaluated or step == self._steps or now - self._told >= self.options.seconds
        if due := due or self._terminal.is_terminal:
            self._told = now
        return due

    def _cells(self, trajectory: Trajectory) -> tuple[str, str, str, str]:
        texts = (shorten(visible(text), self.options.width) for text in sample_texts(trajectory, self._tokenizer))
        prompt, completion, label = map(self._encodable, texts)
        return prompt, completion, label, reward_cell(trajectory)

    def _step_line(self, step: int, values: Mapping[str, float]) -> Text | None:
        parts = []
        if "reward/mean" in values:
            deviation = f" std {values['reward/std']:.3f}" if "reward/std" in values else ""
            parts.append(("reward", f"{values['reward/mean']:.3f}{deviation}"))
        if share := failed_share(values, "reward/mean"):
            parts.append(("failed", f"{share:.1%}"))
        parts += [(label, format(values[name], form).ljust(size)) for label, name, form, size in COLUMNS if name in values]
        of = f"/{self._steps}" if self._steps else ""
        return self._labelled(f"step {step:>{len(of) - 1}}{of}" if of else f"step {step}", parts) if parts else None

    def _eval_line(self, step: int, values: Mapping[str, float]) -> Text:
        """Returns the figures of an evaluation; if episodes failed or answers are unjudged, in a second line, what that means."""
        first = ("eval/pass@", "eval/reward/", "eval/score/", "eval/length/")
        names = [name for name in values if not name.endswith(("/stderr", "/low", "/high"))]
        names.sort(key=lambda name: (next((i for i, start in enumerate(first) if name.startswith(start)), 9), name))
        parts = [(name.removeprefix("eval/"), figure(values, name, ".3f")) for name in names]
        line = self._labelled(f"eval after step {step}", parts)
        of = [f"{name.removeprefix('eval/')}: {said}" for name in names[:1] if (said := beside(values, name))]
        return line.append("".join(f"\n  {text}" for text in of), "yellow")

    def _labelled(self, head: str, parts: Sequence[tuple[str, str]]) -> Text:
        """Returns one line; on a terminal, as many parts as fit."""
        room = self._terminal.width if self._terminal.is_terminal else math.inf
        text = Text(head, "bold", overflow="ellipsis" if room < math.inf else None)
        for label, value in parts:
            shown = visible(label), value if room < math.inf else value.rstrip()
            if text.cell_len + len("  {} {}".format(*shown)) > room:
                break
            text.append("  ").append(f"{shown[0]} ", "not bold dim").append(shown[1], "not bold")
        return text

    def _warn(self, step: int, values: Mapping[str, float]) -> None:
        warnings = {}
        broken = sorted(name for name, value in values.items() if not math.isfinite(value))
        if broken:
            warnings["nonfinite"] = f"not finite: {', '.join(broken)}"
        if values.get("groups/no_variance", 0) == 1:
            warnings["flat"] = "in every group all rewards are the same: this batch has nothing to teach"
        for kind, message in warnings.items():
            if step - self._warned.get(kind, -_REMIND) >= _REMIND:
                self._warned[kind] = step
                self._line(Text(visible(f"warning: step {step}: {message}"), "yellow"))

    def _line(self, text: Text) -> None:
        text.plain = self._encodable(text.plain)
        self._terminal.print(text, soft_wrap=not self._terminal.is_terminal)

    def _encodable(self, text: str) -> str:
        """Escapes characters that the log's encoding lacks, which would raise an exception."""
        encoding = self._terminal.encoding or "utf-8"
        try:
            return text.encode(encoding, "backslashreplace").decode(encoding)
        except LookupError:
            return text
