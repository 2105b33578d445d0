"""The reward ``code_exec``."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Reward, RunContext, ScoreContext, Trajectory, Unjudged, UserError, hookimpl
from rlhf_plugin_code_exec.attacks import ATTACKS, escapes
from rlhf_plugin_code_exec.runner import JailFailed, Level, Limits, Runner, reachable_python
from rlhf_plugin_code_exec.tasks import Calls, Programs, same_output, solution_of, tests_of

log = logging.getLogger(__name__)
_TRIED: dict[str, Level] = {}
"""Interpreter → level at which no attack got out."""


class CodeExec:
    """Does the code in the answer pass its tests? Programs run contained by system calls alone."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        timeout_s: float = Field(
            10.0, gt=0, description="deadline for a program with its tests, or one of its inputs, in seconds"
        )
        cpu_s: int = Field(10, ge=1, description="processor time of each of its processes, in seconds")
        memory_mb: int = Field(512, ge=64, description="address space of each of its processes")
        processes: int = Field(8, ge=1, description="processes and threads that it may have")
        cpus: int = Field(2, ge=1, description="programs that run at the same time")
        partial: bool = Field(False, description="of programs that read inputs: the share of right outputs")
        trust: bool = Field(False, description="run programs uncontained where this machine cannot contain them")
        python: str | None = Field(None, description="interpreter of the programs; default: this one, where they can reach it")

    def __init__(self, options: Options):
        self.options = options
        limits = Limits(options.timeout_s, options.cpu_s, options.memory_mb << 20, options.processes)
        self.runner = Runner(options.python or reachable_python(), limits, options.cpus)
        self._checked = False

    @hookimpl
    async def run_started(self, context: RunContext) -> None:
        await self.check()

    async def check(self) -> Level:
        """Try every attack, once in a process; the strictest level that holds. Raises ``UserError`` where none does."""
        if (known := _TRIED.get(self.runner.python)) is not None:
            self._checked, self.runner.level = True, known
            return known
        why = ""
        levels: tuple[Level, ...] = ("A", "B")
        for level in levels:
            self.runner.level = level
            try:
                told = await self.runner.tests("def f(): return 3", Calls("", "assert f() == 3", ["f"]))
                if verdict_of(told)[0] != 1.0:
                    raise JailFailed(f"a harmless program does not run: {told['results'][0]}")
                escaped = await escapes(self.runner)
            except JailFailed as failure:
                why = str(failure)
                continue
            if escaped:
                why = f"these programs were not contained: {', '.join(escaped)}"
                continue
            self._checked, _TRIED[self.runner.python] = True, level
            log.warning("code_exec: programs are contained at level %s (%d attacks tried)", level, len(ATTACKS))
            return level
        if self.options.trust:
            log.warning("code_exec: programs are NOT contained (trust): %s", why)
            self._checked, self.runner.level = True, "none"
            return "none"
        raise UserError(
            f"code_exec cannot contain programs on this machine: {why}. It needs Linux with Landlock (5.13 or later) on x86_64 or"
            " aarch64, and an interpreter that other users can reach (--reward.code_exec.python /usr/bin/python3)"
        )

    @hookimpl
    async def score(self, trajectories: Sequence[Trajectory], context: ScoreContext) -> list[Reward | Unjudged]:
        if not self._checked:
            await self.check()
        return list(await asyncio.gather(*(self._judge(trajectory) for trajectory in trajectories)))

    async def _judge(self, trajectory: Trajectory) -> Reward | Unjudged:
        try:
            tests = tests_of(trajectory.task)
        except ValueError as error:
            return Unjudged(f"the task: {error}")
        except (TypeError, MemoryError, RecursionError) as error:
            return Unjudged(f"the task: its tests cannot be read: {type(error).__name__}: {error}")
        code = solution_of(trajectory.last_text, tests.before if isinstance(tests, Calls) else "")
        try:
            told = await self.runner.tests(code, tests, first_only=not self.options.partial)
        except JailFailed as failure:
            return Unjudged(f"the jail: {failure}")
        score, counts, unusable = verdict_of(told, tests)
        if unusable:
            return Unjudged(unusable)
        if not self.options.partial:
            score = float(score == 1.0)
        names = ("timeouts", "errors", "wrong")
        metrics = {f"code/{name}": float(counts[name]) for name in names}
        return Reward(score, score=score, metrics=metrics)


def verdict_of(told: dict[str, Any], tests: Calls | Programs | None = None) -> tuple[float, Counter[str], str]:
    """Share of tests that passed, why others did not, and why nobody can say."""
    counts: Counter[str] = Counter()
    results = told["results"]
    if isinstance(tests, Programs):
        right = 0
        for result, wanted in zip(results, tests.outputs, strict=False):
            if result["why"] == "late":
                counts["timeouts"] += 1
            elif result["why"] != "ended" or result["code"] != 0:
                counts["errors"] += 1
            elif same_output(result["stdout"], wanted):
                right += 1
            else:
                counts["wrong"] += 1
        return right / len(tests.outputs), counts, ""
    [result] = results
    if result["why"] == "late":
        return 0.0, Counter(timeouts=1), ""
    try:
        verdict = json.loads(result["verdict"])
    except ValueError:
        return 0.0, Counter(errors=1), ""  # it used up what the judge has, as by endless values
    if "unusable" in verdict:
        return 0.0, counts, str(verdict["unusable"])
    if verdict.get("passed") is True:
        return 1.0, counts, ""
    return 0.0, Counter(["wrong" if str(verdict.get("failed", "")).startswith("AssertionError") else "errors"]), ""
