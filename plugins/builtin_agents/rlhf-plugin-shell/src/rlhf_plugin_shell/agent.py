"""The agent ``shell``."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlhf_host import (
    AgentNeeds,
    Episode,
    EpisodeFailed,
    Message,
    NoRoom,
    Policy,
    RunContext,
    Task,
    Trajectory,
    hookimpl,
)
from rlhf_plugin_shell.commands import HINTS, SCHEMA, TOOL, Asked, Format, commands
from rlhf_plugin_shell.outputs import shortened, told
from rlhf_plugin_shell.sandboxes import Ran, Sandbox, Sandboxes, SandboxFailed, ShellLimits, kind_named, options_of
from rlhf_plugin_shell.verdicts import REPORTS, Verdict, verdict
from rlhf_plugin_shell.work import TESTS, Work, work_of

LOGGED = 4000
"""Maximum characters of an output in the log of trajectories."""
MOST_CALLS = 16
"""Commands of one answer that are run."""
CONTAINED = "contained"
"""The sandbox with this machine's programs."""


class ShellAgent:
    """The policy works in a shell, contained or in a container; the tests of the task's row give the reward."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        format: Literal["auto", "native", "fence", "line"] = Field(
            "auto",
            description="how commands are written. native: calls of a tool, by the chat template; fence: blocks fenced as sh;"
            " line: the first line of the answer; auto: native where the chat template has tools, else fence",
        )
        max_turns: int = Field(8, ge=1, description="answers per episode; commands of the last one are run, too")
        hint: str | None = Field(None, description="text before the task's prompt; default: how to write a block, for fence")
        timeout_s: float = Field(10.0, gt=0, description="deadline for a command, in seconds")
        setup_timeout_s: float = Field(60.0, gt=0, description="deadline for the row's setup, in seconds")
        tests_timeout_s: float = Field(60.0, gt=0, description="deadline for the row's tests, in seconds")
        max_output_chars: int = Field(4000, ge=10, description="longest output shown; of longer ones, head and tail are kept")
        cpu_s: int = Field(60, ge=1, description="processor time of each process of a command, in seconds")
        memory_mb: int = Field(1024, ge=64, description="memory of a command, and of each of its processes")
        processes: int = Field(32, ge=2, description="processes that a command may have; threads: 64")
        files: int = Field(1000, ge=1, le=100_000, description="files and folders that a shell may have")
        file_mb: int = Field(64, ge=1, description="largest file")
        disk_mb: int = Field(256, ge=1, description="all files of a shell together")
        at_once: int = Field(4, ge=1, description="shells at the same time")
        rewards: bool = Field(
            True, description="the row's tests give the reward; if not, --reward plugins judge the last answer"
        )
        trust: bool = Field(False, description="run commands uncontained where this machine cannot contain them")
        python: str | None = Field(
            None, description="interpreter that commands may read, with its packages; default: as code_exec"
        )
        sandbox: str = Field(
            CONTAINED,
            description="where commands run. contained: a shell of this machine; docker, podman: containers; e2b: machines of a"
            " service",
        )
        sandbox_options: dict[str, Any] = Field(default_factory=dict, description="options of the sandbox")

        @model_validator(mode="after")
        def _sandbox_is_known(self) -> ShellAgent.Options:
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

    def __init__(self, options: Options):
        self.options = options
        self.format: Format = "fence" if options.format == "auto" else options.format
        limits = ShellLimits(
            options.cpu_s,
            options.memory_mb << 20,
            options.processes,
            options.file_mb << 20,
            options.files,
            options.disk_mb << 20,
            cpus=os.cpu_count() or 1,
        )
        kind, given = options.sandbox_given()
        self.sandboxes: Sandboxes = kind(given, limits)
        self._works: dict[str, Work] = {}
        """One task for each environment that is known before the run."""

    @hookimpl
    def needs(self) -> AgentNeeds:
        return AgentNeeds(rewards=not self.options.rewards, episodes_at_once=self.options.at_once)

    @hookimpl
    async def run_started(self, context: RunContext) -> None:
        if self.options.format == "auto":
            data = context.config.get("data") or {}
            template = str(getattr(context.tokenizer, "chat_template", None) or "")
            native = not data.get("template") and "tools" in template and "tool_calls" in template
            self.format = "native" if native else "fence"
        await self.sandboxes.start()
        await self.sandboxes.prepare(list(self._works.values()))

    @hookimpl
    async def run_finished(self, outcome: object) -> None:
        await self.sandboxes.close()

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
        try:
            counts = await self._converse(episode, policy, shell, work)
            judged = await self.judged(shell, work) if self.options.rewards else None
        except SandboxFailed as failure:
            raise EpisodeFailed(f"the shell: {failure}", retryable=True) from failure
        finally:
            await shell.close()
        rows = policy.trajectories()
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
        try:
            shell = await self.sandboxes.open(work)
        except SandboxFailed as failure:
            raise EpisodeFailed(f"the shell: {failure}", retryable=True) from failure
        try:
            if work.files:
                await shell.put(work.files)
            if work.setup:
                seconds = min(self.options.setup_timeout_s, work.setup_s or self.options.setup_timeout_s)
                ran = await shell.run(work.setup, seconds, variables=work.variables)
                if ran.why != "ended" or ran.code != 0:
                    raise EpisodeFailed(f"the task's setup: {told(ran, seconds, 1000)}")
        except SandboxFailed as failure:
            await shell.close()
            raise EpisodeFailed(f"the shell: {failure}", retryable=True) from failure
        except BaseException:
            await shell.close()
            raise
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

    async def _converse(self, episode: Episode, policy: Policy, shell: Sandbox, work: Work) -> Counter[str]:
        counts: Counter[str] = Counter()
        messages = self._first(episode.task.prompt)
        tools = [SCHEMA] if self.format == "native" else None
        left = work.seconds or float("inf")
        for _ in range(self.options.max_turns):
            try:
                reply = await policy.chat(messages, tools)
            except NoRoom:
                if not counts["turns"]:
                    raise
                counts["no_room"] += 1
                break
            counts["turns"] += 1
            asked = commands(reply, self.format)[:MOST_CALLS]
            counts["malformed"] += len(reply.problems) if tools else 0
            if not asked and not (tools and reply.problems):
                break
            messages = [*messages, reply.message]
            texts = []
            for each in asked:
                started = time.monotonic()
                texts.append(await self._ran(each, episode, shell, work, min(self.options.timeout_s, left), counts))
                left -= time.monotonic() - started
            messages += self._told(asked, texts, reply.problems if tools else ())
            if left <= 0:
                counts["out_of_time"] += 1
                break
        return counts

    async def _ran(
        self, asked: Asked, episode: Episode, shell: Sandbox, work: Work, seconds: float, counts: Counter[str]
    ) -> str:
        if asked.problem:
            counts["malformed"] += 1
            return f"Error: {asked.problem}"
        if seconds <= 0:
            return "not run: the time for this task is over"
        counts["commands"] += 1
        try:
            ran = await shell.run(asked.command, seconds, variables=work.variables)
        except ValueError as error:
            counts["malformed"] += 1
            return f"Error: {error}"
        counts["late"] += ran.why == "late"
        counts["failed"] += ran.code != 0
        text = told(ran, seconds, self.options.max_output_chars)
        episode.log("shell", command=shortened(asked.command, LOGGED), result=shortened(text, LOGGED), s=round(ran.seconds, 4))
        return text

    def _first(self, prompt: str | Sequence[Message]) -> list[Message]:
        """Returns the prompt, with the hint before the first text of the user."""
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*map(dict, prompt)]
        hint = HINTS[self.format] if self.options.hint is None else self.options.hint
        if not hint:
            return messages
        for message in messages:
            if message["role"] == "user" and isinstance(message["content"], str):
                message["content"] = hint + message["content"]
                return messages
        return [{"role": "user", "content": hint.strip()}, *messages]

    def _told(self, asked: Sequence[Asked], texts: Sequence[str], problems: Sequence[str]) -> list[Message]:
        if self.format != "native":
            return [{"role": "user", "content": "\n\n".join(texts)}]
        seen: list[Message] = [
            {"role": "tool", "name": TOOL, "tool_call_id": each.id, "content": text}
            for each, text in zip(asked, texts, strict=True)
        ]
        if problems:
            seen.append({"role": "user", "content": "This tool call cannot be read: " + "; ".join(problems)})
        return seen

    def _reward(self, row: Trajectory, judged: tuple[Ran, Verdict] | None, counts: Counter[str]) -> None:
        named = ("turns", "commands", "failed", "late", "malformed", "no_room")
        row.metrics = {f"shell/{name}": float(counts[name]) for name in named}
        if judged is None:
            return
        ran, result = judged
        row.agent_rewards = [None] * (len(row.actions) - 1) + [result.reward]
        row.score = result.reward if 0.0 <= result.reward <= 1.0 else None
        row.metrics |= {"shell/tests_ended": float(ran.why != "ended"), "shell/tests_unread": float(bool(result.problem))}
        row.metrics |= {f"shell/{name}": value for name, value in result.parts.items() if name != "reward"}
