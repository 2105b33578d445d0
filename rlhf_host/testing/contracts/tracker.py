"""Checks of trackers: whatever is logged, wherever the run began and however it ended, nothing is lost and nothing raises."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_host.errors import RunError, UserError
from rlhf_host.records.episodes import Reward, Segment, Task, Trajectory
from rlhf_host.records.needs import Outcome
from rlhf_host.testing.contracts.session import Session, said
from rlhf_host.testing.contracts.subject import Broken, Subject, expect
from rlhf_host.testing.contracts.suite import check

HOOKS = ("log_metrics", "log_trajectories")

METRICS: tuple[Mapping[str, float], ...] = (
    {"loss": -0.25, "reward/mean": 0.5, "tokens": 1200},
    {"loss": float("nan"), "grad_norm": float("inf"), "kl": float("-inf"), "tiny": 5e-324, "huge": 1.7e308},
    {"eval/pass@1": 0.75, 'eval/äöü (50%), "q"': 1.0, "a" * 300: 2.0},
    {},
)
"""Metrics come and go from one step to the next."""


def _odd_trajectories() -> list[Trajectory]:
    """Judged, unjudged, unreadable, empty, in chat form, and with words that would move a terminal's cursor."""
    plain = said("4", Task("2+2=", "4"))
    plain.rewards, plain.reward, plain.score = {"math": Reward(1.0, score=1.0)}, 1.0, 1.0
    unjudged = said("5", Task("2+2=", None), 1)
    unjudged.rewards, unjudged.unjudged_reason = {"math": None}, "timed out"
    unreadable = said("4", Task([{"role": "user", "content": "2+2="}], {"answer": {4}}), 2)
    unreadable.decode = None
    empty = said("", Task("2+2=", "4"), 3)
    empty.segments = []
    hostile = said('\x1b[2J\0[red]"hi",\r\n\u202e{}\\ ✓', Task("<b>&amp;</b>\n", "x" * 1000, {"id": Path("a")}), 4)
    hostile.reward, hostile.metrics = float("nan"), {"speed": float("inf")}
    turns = said("let me see", Task("2+2=", "4"), 5)
    turns.segments += [Segment("observation", [ord("?")]), Segment("action", [ord("4")], [-0.5], [1])]
    return [plain, unjudged, unreadable, empty, hostile, turns]


class _Run:
    """A fresh instance in a run of its own."""

    def __init__(self, session: Session):
        self.manager, self.key = session.manager, session.subject.key

    def log(self, step: int, metrics: Mapping[str, float], trajectories: Sequence[Trajectory] | None = None) -> None:
        self.manager.call(self.key, "log_metrics", step=step, metrics=dict(metrics))
        if trajectories is not None:
            for split in ("train", "eval"):
                self.manager.call(self.key, "log_trajectories", step=step, split=split, trajectories=trajectories)


@contextlib.contextmanager
def _run(subject: Subject, run_dir: Path | None, resume_step: int | None = None) -> Iterator[_Run]:
    """Started and finished. Raises ``Broken`` for whatever a hook raises."""
    try:
        with Session(subject, run_dir=run_dir, resume_step=resume_step) as session:
            yield _Run(session)
    except (RunError, UserError) as error:
        raise Broken(f"{error}; a tracker that fails stops a run that would go on") from error


@check(*HOOKS)
def any_metric_is_logged(subject: Subject) -> None:
    """NaN, infinities, odd and long names, and metrics that come and go from step to step are all logged."""
    with tempfile.TemporaryDirectory() as folder, _run(subject, Path(folder)) as run:
        for step, metrics in enumerate([*METRICS, *reversed(METRICS)], start=1):
            run.log(step, metrics)


@check(*HOOKS)
def any_trajectory_is_logged(subject: Subject) -> None:
    """Unjudged, unreadable and empty trajectories and those with hostile words are logged, several turns or none at all."""
    with tempfile.TemporaryDirectory() as folder, _run(subject, Path(folder)) as run:
        for trajectory in _odd_trajectories():
            run.log(1, {"loss": 0.5}, [trajectory])
        run.log(2, {"loss": 0.5}, _odd_trajectories())
        run.log(3, {"loss": 0.5}, [])


@check(*HOOKS)
def runs_without_a_directory_are_logged(subject: Subject) -> None:
    """``rlhf eval`` writes no run directory: ``context.run_dir`` is ``None`` then."""
    with _run(subject, None) as run:
        run.log(0, METRICS[0], _odd_trajectories()[:1])


@check(*HOOKS)
def nothing_is_written_elsewhere(subject: Subject) -> None:
    """Files lie in the run directory, none in the directory that the command was started in."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        run_dir = Path(folder, "run")
        run_dir.mkdir()
        with _run(subject, run_dir) as run:
            run.log(1, METRICS[0], _odd_trajectories()[:2])
        found = sorted(set(os.listdir(folder)) - {"run"})
        expect(not found, f"it writes {', '.join(found)} outside the run directory; write below context.run_dir")


@check(*HOOKS)
def what_is_logged_is_left_alone(subject: Subject) -> None:
    """Neither metrics nor trajectories are changed: the next tracker gets the same ones."""
    metrics, trajectories = dict(METRICS[0]), _odd_trajectories()[:2]
    before = dict(metrics), [copy.deepcopy(trajectory) for trajectory in trajectories]
    with tempfile.TemporaryDirectory() as folder, _run(subject, Path(folder)) as run:
        run.manager.call(run.key, "log_metrics", step=1, metrics=metrics)
        run.manager.call(run.key, "log_trajectories", step=1, split="train", trajectories=trajectories)
    expect(metrics == before[0], "log_metrics changes the metrics it is given; copy them first")
    expect(repr(trajectories) == repr(before[1]), "log_trajectories changes the trajectories it is given")


@check(*HOOKS)
def resumed_runs_keep_their_files(subject: Subject) -> None:
    """A run that goes on in its directory leaves every file of its earlier steps there, none of them shorter."""
    with tempfile.TemporaryDirectory() as folder:
        with _run(subject, Path(folder)) as run:
            for step in (1, 2):
                run.log(step, METRICS[0], _odd_trajectories()[:2])
        before = _sizes(Path(folder))
        with _run(subject, Path(folder), resume_step=2) as run:
            run.log(3, METRICS[0], _odd_trajectories()[:2])
        after = _sizes(Path(folder))
        for name, size in before.items():
            expect(after.get(name, -1) >= size, f"a resumed run loses what {name} held: keep rows up to context.resume_step")


def _sizes(folder: Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


@check(*HOOKS)
def an_early_end_is_survived(subject: Subject) -> None:
    """A run may fail before this tracker was told of its start, or end without a step: ``run_finished`` is called all the same."""
    manager = subject.manager()
    failed: Any = Outcome("failed", 0, error="out of memory")
    try:
        manager.call(subject.key, "run_finished", outcome=failed)
    except (RunError, UserError) as error:
        raise Broken(f"run_finished without run_started: {error}") from error
    finally:
        manager.close()
    with tempfile.TemporaryDirectory() as folder, _run(subject, Path(folder)):
        pass
