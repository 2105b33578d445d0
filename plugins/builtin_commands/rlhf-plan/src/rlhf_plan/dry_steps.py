"""Dry steps: a few steps of a run on this machine with models of few layers, to see what its parts take. Nothing is kept."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from rlhf_host import hookimpl
from rlhf_host.internals import train
from rlhf_host.settings import RunConfig, resolve

WARM, TIMED = 2, 2
"""Steps before any is timed, and timed ones."""
PARTS = {
    "sampling": ("time/rollout",),
    "passes": ("time/logprobs", "time/train"),
    "sync": ("time/sync",),
}
"""Part of a step → metrics of its seconds."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Means over timed steps."""

    seconds: Mapping[str, float]
    """Part → seconds."""
    step: float
    cpu: float
    """CPU seconds of a step."""
    tokens: float
    """Mean length of answers, or tokens in the loss where nothing is sampled."""
    trajectories: float


@dataclass(slots=True)
class Clock:
    """A tracker that keeps metrics, and the CPU seconds of the process at each step."""

    rows: list[dict[str, float]] = field(default_factory=list)

    @hookimpl
    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append({**metrics, "step": step, "cpu": time.process_time()})


class Chance:
    """A reward by chance: the run's own rewards are not asked, which may cost money."""

    @hookimpl
    def score(self, trajectories: Sequence[Any]) -> list[float]:
        return [float(number) for number in torch.rand(len(trajectories))]


def dry_steps(config: RunConfig, models: Mapping[str, str], *, prompts: int, tokens: int | None) -> Timed:
    """Runs dry steps in this process.

    Args:
        models: role → directory of the model that stands for its own.
        prompts: prompts, or rows, of a step.
        tokens: longest answer; None: nothing is sampled.

    Raises:
        UserError, RunError: as ``train`` does.
    """
    clock = Clock()
    with tempfile.TemporaryDirectory() as place, unheard():
        ready, objects = _made_dry(config, models, prompts, tokens, clock, Path(place) / "run")
        run = resolve(ready, objects=objects)
        with closing(run.plugins()) as manager:
            train(run.config, manager)
    before, rows = clock.rows[WARM - 1], clock.rows[WARM:]
    seconds = {part: fmean(sum(row.get(name, 0.0) for name in names) for row in rows) for part, names in PARTS.items()}
    step = fmean(row["time/step"] for row in rows)
    seconds["host"] = step - sum(seconds.values())
    return Timed(
        seconds=seconds,
        step=step,
        cpu=(rows[-1]["cpu"] - before["cpu"]) / len(rows),
        tokens=fmean(row.get("length/mean", row["tokens"]) for row in rows),
        trajectories=fmean(row.get("rollout/finished", prompts) for row in rows),
    )


def _made_dry(
    config: RunConfig, models: Mapping[str, str], prompts: int, tokens: int | None, clock: Clock, run_dir: Path
) -> tuple[RunConfig, dict[tuple[str, str], Any]]:
    """Returns the configuration of dry steps, and the Python objects in it."""
    objects: dict[tuple[str, str], Any] = {("tracker", "clock"): clock}
    roles = {}
    for name, role in config.roles.items():
        own = {"model": models[name], "revision": None, "tokenizer": None} if name in models else {}
        roles[name] = role.model_copy(update=own)
    steps = WARM + TIMED
    tree = config.model_dump(by_alias=True) | {
        "roles": {name: role.model_dump() for name, role in roles.items()},
        "tracker": {"clock": {"name": "python:clock"}},
        "run_dir": str(run_dir),
        "max_restarts": 0,
    }
    tree["eval"] = {}
    tree["checkpoint"] = {"every": 0, "final": False}
    tree["trajectories"]["every"] = 0
    tree["train"] |= {"steps": steps, "batch_size": prompts}
    tree["sync"] |= {"verify": "off"}
    if tokens is not None:
        objects["reward", "chance"] = Chance
        tree["reward"] = {"chance": {"name": "python:chance"}}
        tree["rollout"] |= {"max_new_tokens": tokens}
    return RunConfig.model_validate(tree), objects


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Drops what the steps print, and leaves logging as it was."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
