"""Checks of trackers: whatever is logged, wherever the run began and however it ended, nothing is lost and nothing raises."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_authoring.contracts.session import Session, answer_of, running
from rlhf_authoring.contracts.subject import Broken, Subject, check, expect
from rlhf_host import Outcome, Reward, RunError, Segment, Task, Trajectory, UserError

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
    plain = answer_of("4", Task("2+2=", "4"))
    plain.rewards, plain.reward, plain.score = {"math": Reward(1.0, score=1.0)}, 1.0, 1.0
    unjudged = answer_of("5", Task("2+2=", None), 1)
    unjudged.rewards, unjudged.unjudged_reason = {"math": None}, "timed out"
    unreadable = answer_of("4", Task([{"role": "user", "content": "2+2="}], {"answer": {4}}), 2)
    empty = answer_of("", Task("2+2=", "4"), 3)
    empty.segments = []
    hostile = answer_of('\x1b[2J\0[red]"hi",\r\n\u202e{}\\ ✓', Task("<b>&amp;</b>\n", "x" * 1000, {"id": Path("a")}), 4)
    hostile.reward, hostile.metrics = float("nan"), {"speed": float("inf")}
    turns = answer_of("let me see", Task("2+2=", "4"), 5)
    turns.segments += [Segment("observation", [ord("?")]), Segment("action", [ord("4")], [-0.5], [1])]
    return [plain, unjudged, unreadable, empty, hostile, turns]


def _log(
    session: Session, step: int, metrics: Mapping[str, float] = METRICS[0], trajectories: Sequence[Trajectory] | None = None
) -> None:
    call = partial(session.manager.call, session.subject.key, step=step)  # on this thread, as a run does
    call("log_metrics", metrics=dict(metrics))
    for split in ("train", "eval") if trajectories is not None else ():
        call("log_trajectories", split=split, trajectories=trajectories)


@contextlib.contextmanager
def _run(subject: Subject, run_dir: Path | None, resume_step: int | None = None) -> Iterator[Session]:
    """A run of a fresh instance. Raises ``Broken`` for whatever a hook raises."""
    try:
        with running(subject, run_dir=run_dir, resume_step=resume_step) as session:
            yield session
    except (RunError, UserError) as error:
        raise Broken(f"{error}; a tracker that fails stops a run that would go on") from error


@contextlib.contextmanager
def _run_in_folder(subject: Subject) -> Iterator[Session]:
    with tempfile.TemporaryDirectory() as folder, _run(subject, Path(folder)) as session:
        yield session


@check(*HOOKS)
def any_metric_is_logged(subject: Subject) -> None:
    """NaN, infinities, odd and long names, and metrics that come and go from step to step are all logged."""
    with _run_in_folder(subject) as session:
        for step, metrics in enumerate([*METRICS, *reversed(METRICS)], start=1):
            _log(session, step, metrics)


@check(*HOOKS)
def any_trajectory_is_logged(subject: Subject) -> None:
    """Unjudged, unreadable and empty trajectories and those with hostile words are logged, several turns or none at all."""
    with _run_in_folder(subject) as session:
        for trajectory in _odd_trajectories():
            _log(session, 1, trajectories=[trajectory])
        _log(session, 2, trajectories=_odd_trajectories())
        _log(session, 3, trajectories=[])


@check(*HOOKS)
def runs_without_a_directory_are_logged(subject: Subject) -> None:
    """``rlhf eval`` writes no run directory: ``context.run_dir`` is ``None`` then."""
    with _run(subject, None) as session:
        _log(session, 0, trajectories=_odd_trajectories()[:1])


@check(*HOOKS)
def nothing_is_written_elsewhere(subject: Subject) -> None:
    """Files lie in the run directory, none in the directory that the command was started in."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        run_dir = Path(folder, "run")
        run_dir.mkdir()
        with _run(subject, run_dir) as session:
            _log(session, 1, trajectories=_odd_trajectories()[:2])
        others = sorted(set(os.listdir(folder)) - {"run"})
        expect(not others, f"it writes {', '.join(others)} outside the run directory; write below context.run_dir")


@check(*HOOKS)
def what_is_logged_is_left_alone(subject: Subject) -> None:
    """Neither metrics nor trajectories are changed: the next tracker gets the same ones."""
    metrics, trajectories = dict(METRICS[0]), _odd_trajectories()[:2]
    before = copy.deepcopy(trajectories)
    with _run_in_folder(subject) as session:
        session.manager.call(subject.key, "log_metrics", step=1, metrics=metrics)
        session.manager.call(subject.key, "log_trajectories", step=1, split="train", trajectories=trajectories)
    expect(metrics == METRICS[0], "log_metrics changes the metrics it is given; copy them first")
    expect(repr(trajectories) == repr(before), "log_trajectories changes the trajectories it is given")


@check(*HOOKS)
def resumed_runs_keep_their_files(subject: Subject) -> None:
    """A run that goes on in its directory leaves every file of its earlier steps there, none of them shorter."""
    with tempfile.TemporaryDirectory() as folder:
        with _run(subject, Path(folder)) as session:
            for step in (1, 2):
                _log(session, step, trajectories=_odd_trajectories()[:2])
        files = [path for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink()]
        before = {path: path.stat().st_size for path in files}
        with _run(subject, Path(folder), resume_step=2) as session:
            _log(session, 3, trajectories=_odd_trajectories()[:2])
        for path, size in before.items():
            whole = path.is_file() and path.stat().st_size >= size
            name = path.relative_to(folder).as_posix()
            expect(whole, f"a resumed run loses what {name} held: keep rows up to context.resume_step")


@check(*HOOKS)
def an_early_end_is_survived(subject: Subject) -> None:
    """A run may fail before this tracker was told of its start, or end without a step: ``run_finished`` is called all the same."""
    failed: Any = Outcome("failed", 0, error="out of memory")
    with contextlib.closing(subject.manager()) as manager:
        try:
            manager.call(subject.key, "run_finished", outcome=failed)
        except (RunError, UserError) as error:
            raise Broken(f"run_finished without run_started: {error}") from error
    with _run_in_folder(subject):
        pass
