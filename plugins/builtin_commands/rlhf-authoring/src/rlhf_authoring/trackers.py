"""For tests of trackers: small runs by the command line, what their own files hold, and things that are odd to log.

The runs need no package beside the host, this one and the tracker's.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rlhf_host
from rlhf_authoring import learner
from rlhf_host import RunContext, RunError, Segment, Task, Trajectory, hookimpl

ODD_METRICS: Mapping[str, Any] = {
    "reward/mean": 0.5,
    "nan": math.nan,
    "inf": math.inf,
    "eval/pass@1": 0.25,
    "eval/pass_at_1": 0.75,
    'eval/äöü (50%), "q"': 1.5,
    "../up//down/": 2.5,
    "long/" + "a" * 400: 3.5,
    "step": 4.5,
    "text": "no number",
}
"""Metrics whose names or values a service may refuse, change, or take for one another."""
HOSTILE_TEXT = "\x1b[2J<b>bold</b> \x00 \ud800 \u202e ✓," + "x" * 20_000
"""Text that a model may write: escape sequences, markup, half a character, and much of it."""
WRITTEN_S = 60.0
"""Seconds that a checkpoint beside the steps may take on a busy machine."""
FAILURE = "the test ends it ✓"
"""The message that the second run of ``finish_and_fail`` ends with."""


class KilledAfter:
    """An extension that kills its process after the step in the variable ``KILL_AFTER``, if there is one, once the checkpoint that
    was due before is written.
    """

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        self._context = context

    @hookimpl
    def step_finished(self, step: int) -> None:
        if os.environ.get("KILL_AFTER") == str(step):
            due = step - 1 - (step - 1) % self._context.config["checkpoint"]["every"]
            written, latest = Path(str(self._context.run_dir), f"checkpoints/step-{due:06d}"), time.monotonic() + WRITTEN_S
            while due and not written.is_dir() and time.monotonic() < latest:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class SmallRun:
    """A small run of the real command line, in processes of their own.

    Args:
        folder: where the commands run; the run directory is ``folder/run``.
        hidden: beginnings of variables of this process that the commands do not get.
    """

    folder: Path
    hidden: tuple[str, ...] = ()

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def rlhf(self, *arguments: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        """``rlhf ARGUMENTS``, as ``python`` runs it."""
        return self.python("-m", "rlhf_host", *arguments, code=code, **variables)

    def python(self, *arguments: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        """This Python with these arguments, and these variables added to its environment. Raises ``AssertionError`` with all that
        it printed, where it ends with another exit code.
        """
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(self.hidden)}
        environment = {**inherited, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200", **variables}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode != code:
            raise AssertionError(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def train(self, *arguments: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        """``rlhf train`` on sums, with a checkpoint every second step and an evaluation before and after. The variable
        ``KILL_AFTER="4"`` kills it after step 4: its exit code is -9.
        """
        parts = ("--algo", f"{learner.__file__}:Learner", "--reward", f"{learner.__file__}:right_answer")
        kill = ("--with", f"{__file__}:KilledAfter", "--run-dir", self.run_dir.name)
        size = ("--rollout.n", "2", "--rollout.max-new-tokens", "6", "--train.batch-size", "4", "--train.threads", "1")
        data = ("--data.max-samples", "64", "--eval.data", "arithmetic", "--eval.data.arithmetic.count", "8")
        files = ("--checkpoint.every", "2", "--trajectories.every", "1")
        return self.rlhf("train", *parts, *kill, *size, *data, *files, *arguments, code=code, **variables)

    def context(self, resume_step: int | None = None, **config: Any) -> RunContext:
        """Returns what ``run_started`` of such a run gets, with this configuration; nothing is written."""
        return RunContext(config, None, self.run_dir, 0, {}, resume_step is not None, resume_step or 0)


def finish_and_fail(tracker: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Trains two steps in ``first`` and begins a run in ``second`` that fails with ``FAILURE``, both in this process and in its
    current directory.

    Args:
        tracker: its name.
        first: its options in the first run.
        second: its options in the second run.
    """
    size = {"train.steps": 2, "train.batch_size": 4, "rollout.n": 2, "data.max_samples": 64, "eval.data.arithmetic.count": 8}
    same: dict[str, Any] = {"algo": learner.Learner(), **size}
    rlhf_host.train(**same | {"reward": learner.right_answer, "run_dir": "first", tracker: first})
    with contextlib.suppress(RunError):
        rlhf_host.train(**same | {"reward": _fails, "run_dir": "second", tracker: second})
        raise AssertionError("a run whose reward fails has finished")


def _fails(text: str, label: str) -> bool:
    raise ValueError(FAILURE)


def trajectory(prompt: str = "2+3=", text: str = "5", **fields: Any) -> Trajectory:
    """Returns a trajectory of one turn whose reward and score are 1, with one token a character. ``fields`` are others of its
    fields.
    """
    ids, answer = ([ord(character) for character in part] for part in (prompt, text))
    segments = [Segment("prompt", ids), Segment("action", answer, [-0.5] * len(text), [1] * len(text))]
    made = Trajectory("episode-0", "group-0", Task(prompt, "5"), segments, decode=lambda ids: "".join(map(chr, ids)), **fields)
    made.reward = made.score = 1.0
    return made


def odd_trajectories(text: str = HOSTILE_TEXT) -> list[Trajectory]:
    """Returns trajectories that each break some assumption: one whose prompt, answer and label are ``text``, one without a decoder,
    a conversation without one, one that no reward could judge, and one without tokens.
    """
    undecodable, chat, unjudged, bare = (trajectory() for _ in range(4))
    hostile = trajectory(text, text, metrics={"speed": math.inf})
    hostile.task, hostile.reward = Task(text, text), math.nan
    undecodable.decode = chat.decode = None
    chat.task = Task([{"role": "user", "content": "hello"}], {"answer": {1, 2}, "path": Path("x")})
    unjudged.task, unjudged.rewards, unjudged.unjudged_reason = Task("2+3="), {"math": None}, "timed out after 5 s"
    unjudged.reward = unjudged.score = None
    bare.segments = []
    return [hostile, undecodable, chat, unjudged, bare]


def logged_metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """Returns step → metrics of the run's own file, without what is not finite and without ``time/wall``, which only that file
    has.
    """
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    return {
        row["step"]: {name: value for name, value in row.items() if name not in ("step", "time/wall") and value is not None}
        for row in rows
    }


def logged_trajectories(run_dir: Path, split: str, step: int) -> list[dict[str, Any]]:
    """Returns the rows of the run's own file of a split, ``"train"`` or ``"eval"``, at a step."""
    path = run_dir / f"trajectories/{split}-step-{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
