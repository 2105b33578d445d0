"""A base of agents whose episodes are played in a sandbox: files before, tests after, and the reward."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlhf_host import AgentNeeds, Episode, EpisodeFailed, Metric, Policy, RunContext, Task, Trajectory, hookimpl
from rlhf_plugin_shell.outputs import shortened, told
from rlhf_plugin_shell.sandboxes import Ran, Sandbox, Sandboxes, SandboxFailed, ShellLimits, kind_named, options_of
from rlhf_plugin_shell.verdicts import REPORTS, Verdict, verdict
from rlhf_plugin_shell.work import TESTS, Work, work_of

LOGGED = 4000
"""Maximum characters of an output in the log of trajectories."""
CONTAINED = "contained"
"""The sandbox with this machine's programs."""
FIGURES = ("sandboxes", "sandbox_failures", "sandbox_s", "sandbox_start_s")
"""Figures of a step: sandboxes that were opened, those that failed, and seconds of all together, open and until they were."""


class SandboxOptions(BaseModel):
    """Options of every agent in a sandbox."""

    model_config = ConfigDict(extra="forbid")

    timeout_s: float = Field(10.0, gt=0, description="deadline for a command, in seconds")
    setup_timeout_s: float = Field(60.0, gt=0, description="deadline for the row's setup, in seconds")
    tests_timeout_s: float = Field(60.0, gt=0, description="deadline for the row's tests, in seconds")
    cpu_s: int = Field(60, ge=1, description="processor time of each process of a command, in seconds")
    memory_mb: int = Field(1024, ge=64, description="memory of a command, and of each of its processes")
    processes: int = Field(32, ge=2, description="processes that a command may have; threads: 64")
    files: int = Field(1000, ge=1, le=100_000, description="files and folders that a shell may have")
    file_mb: int = Field(64, ge=1, description="largest file")
    disk_mb: int = Field(256, ge=1, description="all files of a shell together")
    at_once: int = Field(4, ge=1, description="shells at the same time")
    rewards: bool = Field(True, description="the row's tests give the reward; if not, --reward plugins judge the last answer")
    trust: bool = Field(False, description="run commands uncontained where this machine cannot contain them")
    python: str | None = Field(None, description="interpreter that commands may read, with its packages; default: as code_exec")
    sandbox: str = Field(
        CONTAINED,
        description="where commands run. contained: a shell of this machine; docker, podman: containers; e2b: machines of a"
        " service",
    )
    sandbox_options: dict[str, Any] = Field(default_factory=dict, description="options of the sandbox")

    @model_validator(mode="after")
    def _sandbox_is_known(self) -> SandboxOptions:
        self.sandbox_given()
        return self

    def sandbox_given(self) -> tuple[type[Sandboxes], BaseModel]:
        """Returns the kind of sandboxes, and its options. Raises ``ValueError``."""
        kind, given = kind_named(self.sandbox), dict(self.sandbox_options)
        for name in ("trust", "python"):
            if value := getattr(self, name):
                if self.sandbox != CONTAINED:
                    raise ValueError(f"{name} is for --agent.sandbox {CONTAINED}")
                given.setdefault(name, value)
        return kind, options_of(kind, self.sandbox, given)


class SandboxAgent:
    """Each episode has a sandbox of its own; subclasses say in ``play`` what happens there."""

    COUNTS: tuple[str, ...] = ()
    """Counts of ``play`` that are metrics of a row."""

    def __init__(self, options: SandboxOptions):
        self.options = options
        most = ShellLimits(
            options.cpu_s,
            options.memory_mb << 20,
            options.processes,
            options.file_mb << 20,
            options.files,
            options.disk_mb << 20,
            cpus=os.cpu_count() or 1,
        )
        kind, given = options.sandbox_given()
        self.sandboxes: Sandboxes = kind(given, most)
        self._works: dict[str, Work] = {}
        """One task for each environment that is known before the run."""
        self._figures: Counter[str] = Counter()

    async def play(self, episode: Episode, policy: Policy, shell: Sandbox, work: Work) -> tuple[Counter[str], str | None]:
        """Plays an episode. Returns counts by name, and the id of the call whose answer is judged, or ``None`` for the last."""
        raise NotImplementedError

    @hookimpl
    def needs(self) -> AgentNeeds:
        return AgentNeeds(rewards=not self.options.rewards, episodes_at_once=self.options.at_once)

    @hookimpl
    async def run_started(self, context: RunContext) -> None:
        await self.sandboxes.start()
        await self.sandboxes.prepare(list(self._works.values()))

    @hookimpl
    async def run_finished(self, outcome: object) -> None:
        await self.sandboxes.close()

    @hookimpl
    def step_metrics(self, step: int) -> list[Metric]:
        figures, self._figures = self._figures, Counter()
        return [Metric(name, float(figures[name])) for name in FIGURES]

    @hookimpl
    def check_labels(self, tasks: Sequence[Task]) -> dict[int, str]:
        return {place: reason for place, task in enumerate(tasks) if (reason := self._misfit(task))}

    def _misfit(self, task: Task) -> str:
        try:
            work = work_of(task)
        except (ValueError, OSError) as error:
            return " ".join(str(error).split())
        places = {str(above) for name in work.files for above in PurePosixPath(name).parents} - {"."}
        if (count := len(work.files) + len(places)) > self.options.files:
            return f"it has {count} files and folders, and agent.files allows {self.options.files}"
        sizes = [len(file.content) for file in work.files.values()]
        for name, size in (("file_mb", max(sizes, default=0)), ("disk_mb", sum(sizes))):
            if size > (most := getattr(self.options, name)) << 20:
                return f"its files have {size:,} bytes, and agent.{name} allows {most} MiB"
        if self.options.rewards and not work.tests:
            return "it has no tests: a column tests, with a command or a script; or --agent.rewards false, with a --reward"
        if not self.options.rewards and work.tests:
            return "it has tests, which --agent.rewards false does not run: leave them unread (data.ignore tests)"
        if reason := self.sandboxes.misfit(work):
            return reason
        self._works.setdefault(work.environment, replace(work, files={}, tests={}))
        return ""

    @hookimpl
    async def agent_run(self, episode: Episode, policy: Policy) -> list[Trajectory]:
        if reason := self._misfit(episode.task):
            raise EpisodeFailed(f"the task: {reason}")
        work = work_of(episode.task)
        shell = await self.opened(work)
        began = time.monotonic()
        try:
            counts, final = await self.play(episode, policy, shell, work)
            judged = await self.judged(shell, work) if self.options.rewards else None
        except SandboxFailed as failure:
            self._figures["sandbox_failures"] += 1
            raise EpisodeFailed(f"the shell: {failure}", retryable=True) from failure
        finally:
            await shell.close()
            self._figures["sandbox_s"] += time.monotonic() - began  # type: ignore[assignment]
        rows = policy.trajectories(final)
        if not rows:
            raise EpisodeFailed("the prompt leaves no room for an answer")
        for row in rows:
            if row.final:
                self._reward(row, judged, counts)
        if judged is not None:
            ended, result = judged
            output = shortened(ended.output, LOGGED)
            episode.log("tests", reward=result.reward, code=ended.code, output=output, problem=result.problem, s=ended.seconds)
        return rows

    async def opened(self, work: Work) -> Sandbox:
        """Returns a shell with the files of a task, after its setup. Raises ``EpisodeFailed`` if there is none, or the setup
        fails.
        """
        began = time.monotonic()
        shell: Sandbox | None = None
        try:
            shell = await self.sandboxes.open(work)
            self._figures["sandboxes"] += 1
            self._figures["sandbox_start_s"] += time.monotonic() - began  # type: ignore[assignment]
            if work.files:
                await shell.put(work.files)
            if work.setup:
                seconds = min(self.options.setup_timeout_s, work.setup_s or self.options.setup_timeout_s)
                ran = await shell.run(work.setup, seconds, variables=work.variables)
                if ran.why != "ended" or ran.code != 0:
                    raise EpisodeFailed(f"the task's setup: {told(ran, seconds, 1000)}")
        except BaseException as failure:
            if shell is not None:
                await shell.close()
            if not isinstance(failure, SandboxFailed):
                raise
            self._figures["sandbox_failures"] += 1
            raise EpisodeFailed(f"the shell: {failure}", retryable=True) from failure
        return shell

    async def judged(self, shell: Sandbox, work: Work) -> tuple[Ran, Verdict]:
        """Runs the tests, which see what the commands left as files, and nothing else of them. Raises ``SandboxFailed``."""
        await shell.put(work.tests, "tests")
        await shell.logs(("verifier", "agent", "artifacts"))
        seconds = min(self.options.tests_timeout_s, work.tests_s or self.options.tests_timeout_s)
        command = f'"$TESTS_DIR/{TESTS}"'
        variables = {**work.variables, **work.tests_variables}
        ran = await shell.run(command, seconds, fresh=True, sees=("tests", "logs"), variables=variables)
        reports = {name: await shell.read(f"logs/verifier/{name}") for name in REPORTS}
        return ran, verdict(ran, reports, work.only_reported)

    def _reward(self, row: Trajectory, judged: tuple[Ran, Verdict] | None, counts: Counter[str]) -> None:
        row.metrics = {f"shell/{name}": float(counts[name]) for name in self.COUNTS}
        if judged is None:
            return
        ran, result = judged
        row.agent_rewards = [None] * (len(row.actions) - 1) + [result.reward]
        row.score = result.reward if 0.0 <= result.reward <= 1.0 else None
        row.metrics |= {"shell/tests_ended": float(ran.why != "ended"), "shell/tests_unread": float(bool(result.problem))}
        parts = {f"shell/{name}": value for name, value in result.parts.items() if name != "reward"}
        row.metrics = parts | row.metrics  # a report does not replace what the agent counts
