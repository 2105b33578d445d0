"""The jsonl tracker: ``metrics.jsonl`` and ``trajectories/`` in the run directory."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rlhf_host.directories import Lines, write_file
from rlhf_host.errors import UserError
from rlhf_host.hookspecs import hookimpl
from rlhf_host.records.episodes import Trajectory
from rlhf_host.records.needs import Outcome, RunContext
from rlhf_host.trackers.records import prompt_text, setting, spread
from rlhf_host.training.picture_files import PictureFiles
from rlhf_host.training.records import json_line, provenance, record

log = logging.getLogger(__name__)


class JsonLines:
    """Writes ``metrics.jsonl`` and ``trajectories/`` into the run directory. Strict JSON, one object per line; NaN and
    infinities are ``null``.

    ``metrics.jsonl`` gets a row per call, flushed at once. ``trajectories/{split}-step-{step:06d}.jsonl`` appears complete or
    not at all; ``trajectories:`` sets how often and how many. A resumed run removes the rows after the step it resumes from,
    and reports missing rows before its first.
    """

    def __init__(self, options: BaseModel):
        self.options = options
        self._run_dir: Path | None = None
        self._metrics: Lines | None = None
        self._before: set[int] | None = None
        self._every, self._limit, self._tokens = 1, 0, False
        self._config: Mapping[str, Any] = {}

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        self._config = context.config
        self._every = setting(context.config, "every", 1)
        self._limit = setting(context.config, "max_per_step", 0)
        self._tokens = setting(context.config, "tokens", False)
        if context.run_dir is None:
            return
        self._run_dir = Path(context.run_dir)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        path = self._run_dir / "metrics.jsonl"
        try:
            steps = _mend(path, context.resume_step if context.resumed else None)
            path.open("ab").close()
        except OSError as error:
            raise UserError(f"{path} cannot be used: {error.strerror}; move it away or fix it") from error
        self._metrics = Lines(path)
        self._before = steps if context.resumed else None

    @hookimpl
    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._metrics is None:
            return
        if self._before is not None:
            if step in self._before:  # its row was written by a run that did not come to the next checkpoint
                _mend(self._metrics.path, step - 1)
            # The last step's own row is written only now when the run was stopped before it was complete.
            if lost := sorted(set(range(1, step)) - self._before):
                path = self._metrics.path
                log.warning("%s lacks the rows of %d steps, from step %d to step %d", path, len(lost), lost[0], lost[-1])
            self._before = None
        self._metrics.add(json_line({**metrics, "step": step, "time/wall": round(time.time(), 3)}))

    @hookimpl
    def log_trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        if self._run_dir is None or not self._every or not trajectories or (split == "train" and step % self._every):
            return
        rows = spread(trajectories, self._limit or len(trajectories), first=True)
        folder = self._run_dir / "trajectories"
        folder.mkdir(exist_ok=True)
        origin = provenance(self._config, split) if self._tokens else {}
        named = PictureFiles(folder).named
        try:
            lines = [json_line({"step": step, "split": split, **self._record(row), **origin}, named) for row in rows]
            write_file(folder / f"{split}-step-{step:06d}.jsonl", b"".join(lines))
        except OSError as error:
            log.warning("%s is not written: %s", error.filename, error.strerror)

    def _record(self, trajectory: Trajectory) -> dict[str, Any]:
        if trajectory.decode is not None:
            return record(trajectory, tokens=self._tokens)
        readable = replace(trajectory, decode=lambda token_ids: "")
        return record(readable, tokens=self._tokens) | {"prompt": prompt_text(trajectory)}

    @hookimpl
    def run_finished(self, outcome: Outcome) -> None:
        if self._metrics is not None:
            self._metrics.flush()
            self._metrics = None


def _mend(path: Path, last_step: int | None) -> set[int]:
    """Removes an incomplete last line, and rows after ``last_step``; returns the steps of the others."""
    if not path.exists():
        return set()
    content = path.read_bytes()
    rows = [(step, line) for line in content.splitlines(keepends=True) if (step := _step(line)) is not None]
    kept = b"".join(line for step, line in rows if last_step is None or step <= last_step)
    if kept != content:
        write_file(path, kept)
    return {step for step, _ in rows if last_step is None or step <= last_step}


def _step(line: bytes) -> int | None:
    """Returns the step of a complete row."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if isinstance(step, int) else None
