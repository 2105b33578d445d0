"""One reader of run directories: settings, metrics, samples, and how the run ended."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf_host.config.run_dir import CONFIG, PLUGINS, about_run, checkpoint_dirs, in_use, named_run, require_run
from rlhf_host.config.tree import SHORTHANDS
from rlhf_host.config.yaml_file import plain, read_yaml
from rlhf_host.errors import UserError, near_matches
from rlhf_host.runs.signs import Signs

HEADLINES = ("eval/pass@1", "eval/score/mean", "eval/reward/mean", "eval/loss", "reward/mean", "loss")
"""The most telling metrics of a run, as far as it has them; the one named by ``checkpoint.best`` comes before them."""

_SHORT = {f"roles.{role}.": f"{short}." for short, role in SHORTHANDS.items()}


class RunDirectory:
    """Reader of a run directory, or of the run in ``runs/`` with this name. It reads on demand, tolerates half-written files of a
    killed run, and notes what it could not read in ``damage``.

    Raises:
        UserError: ``path`` is not a run directory.
    """

    def __init__(self, path: str | Path):
        self.path = named_run(Path(path))
        require_run(self.path)
        self._damage: dict[Path, str] = {}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """``config.yaml``, as plain values. Raises ``UserError`` if it is not that of a run."""
        settings: Any = plain(read_yaml(self.path / CONFIG))
        for section, name in (("train", "steps"), ("checkpoint", ""), ("roles", "actor"), ("data", "sources")):
            inside = settings.get(section) if isinstance(settings, dict) else None
            if not isinstance(inside, dict) or (name and name not in inside):
                raise UserError(f"{self.path / CONFIG} has no {section}.{name}".rstrip(".") + ": rlhf train writes it whole")
        known: dict[str, Any] = settings
        return known

    @cached_property
    def plugins(self) -> list[dict[str, Any]]:
        """Kind, alias, name, distribution and version of each plugin."""
        path = self.path / PLUGINS
        try:
            found: Any = json.loads(path.read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            found = None
        rows = found if isinstance(found, list) else []
        known = [row for row in rows if isinstance(row, dict) and {"kind", "alias", "name"} <= row.keys()]
        if not known or len(known) < len(rows):
            self._damage[path] = f"{path} is damaged or missing: it has no plugins, or lacks some"
        return known

    @cached_property
    def about(self) -> dict[str, Any]:
        """``run.json``: when and how the run began and ended, and its packages. Empty where the file is damaged or missing."""
        return about_run(self.path)

    @property
    def status(self) -> Any:
        """``running``, ``finished``, ``interrupted``, ``failed``, or ``killed`` if nothing could be written at the end."""
        known = self.about.get("status", "finished" if (self.path / "model").is_dir() else "running")
        if known == "running" and not self.in_use:
            return "killed"
        return known

    @property
    def in_use(self) -> bool:
        """True if a process is writing there now."""
        return in_use(self.path)

    @property
    def checkpoints(self) -> list[tuple[int, Path]]:
        """Step and directory of the complete checkpoints, oldest first."""
        return checkpoint_dirs(self.path)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of ``metrics.jsonl``, one per step, by step."""
        rows = {row["step"]: row for row in self._rows(self.path / "metrics.jsonl") if isinstance(row.get("step"), int)}
        return [rows[step] for step in sorted(rows)]

    @cached_property
    def curves(self) -> dict[str, tuple[list[int], list[float]]]:
        """Metric → its steps and values, without values that are not finite numbers."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for row in self.metrics:
            for name, value in row.items():
                if name not in ("step", "time/wall") and _finite(value):
                    steps, values = found.setdefault(name, ([], []))
                    steps.append(row["step"])
                    values.append(float(value))
        return found

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Returns a metric's steps and values. Raises ``UserError`` for a metric that the run does not have."""
        if name not in self.curves:
            raise UserError(f"{self.path} has no metric {name!r}{near_matches(name, self.curves)}")
        return self.curves[name]

    @property
    def step(self) -> int:
        """Last logged step; if there are no metrics to read, the one that ``run.json`` has."""
        rows, noted = self.metrics, self.about.get("step")
        if not rows and isinstance(noted, int):
            return noted
        return int(rows[-1]["step"]) if rows else 0

    @property
    def damage(self) -> list[str]:
        """What could not be read of the files that were read so far, a line per file."""
        return list(self._damage.values())

    @property
    def steps(self) -> int | None:
        """Number of planned steps."""
        return self.about.get("steps") or self.settings["train"]["steps"]

    @property
    def headline(self) -> str | None:
        """Most telling metric."""
        best = self.settings["checkpoint"].get("best")
        return next((name for name in (best, *HEADLINES) if name in self.curves), None)

    @property
    def warnings(self) -> list[str]:
        """Warnings about its metrics that were given while it ran."""
        signs = Signs()
        rows = [row for row in self.metrics if row["step"]]
        looks = ({name: value for name, value in row.items() if _finite(value)} for row in rows)
        return [f"step {row['step']}: {report}" for row in looks for report in signs.look(row)]

    @cached_property
    def trajectories(self) -> dict[tuple[str, int], Path]:
        """Split and step → file."""
        found = {}
        for path in sorted((self.path / "trajectories").glob("*-step-*.jsonl")):
            split, _, step = path.stem.partition("-step-")
            if step.isascii() and step.isdecimal():
                found[split, int(step)] = path
        return dict(sorted(found.items(), key=lambda item: item[0][1]))

    def rows(self, split: str, step: int) -> list[dict[str, Any]]:
        """Returns the trajectories of a step, as in ``trajectories/``."""
        return list(self._rows(self.trajectories[split, step]))

    @cached_property
    def draws(self) -> dict[str, int]:
        """Outcomes of the tasks that were drawn, from ``ledger.jsonl``: outcome → number."""
        counts: dict[str, int] = {}
        for row in self._rows(self.path / "ledger.jsonl"):
            with suppress(KeyError, TypeError, ValueError):
                for *_, outcome in row["draws"]:
                    counts[outcome] = counts.get(outcome, 0) + 1
        return counts

    def _rows(self, path: Path) -> Iterator[dict[str, Any]]:
        """Yields the complete lines of JSON objects; a killed run may have left part of one at the end."""
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        bad = []
        for number, line in enumerate(lines, 1):
            row = _object(line)
            if row is not None:
                yield row
            elif line.strip() and (number < len(lines) or self.status not in ("running", "killed")):
                bad.append(number)
        if bad:
            more = f", and {len(bad) - 1} more such lines" if len(bad) > 1 else ""
            self._damage[path] = f"{path}:{bad[0]}: damaged, left out: not a JSON object{more}"


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a tree of settings as dotted names; those of roles have the form of files and flags."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, _SHORT.get(f"{prefix}{name}.", f"{prefix}{name}."))
        else:
            found[prefix + name] = value
    return found


def _finite(value: Any) -> bool:
    """Returns True for a number that a plot can show; JSON has larger ones."""
    return isinstance(value, int | float) and -sys.float_info.max <= value <= sys.float_info.max


def _object(line: bytes) -> dict[str, Any] | None:
    """Returns a line's JSON object, if it is one."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
