"""The reward ``code_exec``."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Reward, RunContext, ScoreContext, Task, Trajectory, Unjudged, hookimpl
from rlhf_plugin_code_exec.answers import solution_of
from rlhf_plugin_code_exec.contained.compare import same_output
from rlhf_plugin_code_exec.containment import strictest_level
from rlhf_plugin_code_exec.forms import Programs, Suite, Tests, tests_of
from rlhf_plugin_code_exec.interpreters import reachable_python
from rlhf_plugin_code_exec.rehearsals import Plan, Rehearsals
from rlhf_plugin_code_exec.runner import JailFailed, Level, Limits, Runner

log = logging.getLogger(__name__)
SAID = {"timeouts": "The program took too long.", "wrong": "A test failed.", "errors": "The program failed."}
"""Reasons in words, for ``Reward.feedback``."""
COUNTED = ("timeouts", "errors", "wrong", "missing_modules")
MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
MOST_WARNINGS = 20


class CodeExec:
    """Does the code in the answer pass its tests? Programs run contained by system calls alone."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        timeout_s: float = Field(
            10.0, gt=0, description="deadline for a program with its tests, or one of its inputs, in seconds"
        )
        cpu_s: int = Field(10, ge=1, description="processor time of each of its processes, in seconds")
        memory_mb: int = Field(512, ge=64, description="memory of a program, and address space of each of its processes")
        processes: int = Field(8, ge=1, description="processes that it may have; threads: 64")
        cpus: int = Field(2, ge=1, description="programs that run at the same time")
        partial: bool = Field(False, description="with inputs and outputs: the share of right outputs")
        trust: bool = Field(False, description="run programs uncontained where this machine cannot contain them")
        python: str | None = Field(
            None, description="interpreter of the programs, with its packages; default: this one, where they can reach it"
        )

    def __init__(self, options: Options):
        self.options = options
        limits = Limits(options.timeout_s, options.cpu_s, options.memory_mb << 20, options.processes)
        self.runner = Runner(options.python or reachable_python(), limits, options.cpus)
        self.rehearsals = Rehearsals(self.runner)
        self._checked = False
        self._missing: set[str] = set()
        """Modules that programs lack and that were already reported."""

    @hookimpl
    async def run_started(self, context: RunContext) -> None:
        await self.check()

    async def check(self) -> Level:
        """Tries every attack, once per process, and chooses the strictest level that holds. Raises ``UserError`` if none does."""
        level = await strictest_level("code_exec", self.runner, trust=self.options.trust)
        self._checked = True
        return level

    @hookimpl
    async def score(self, trajectories: Sequence[Trajectory], context: ScoreContext) -> list[Reward | Unjudged]:
        if not self._checked:
            await self.check()
        return list(await asyncio.gather(*(self._judge(trajectory) for trajectory in trajectories)))

    @hookimpl
    def check_labels(self, tasks: Sequence[Task]) -> dict[int, str]:
        told = ((place, _tests(task)) for place, task in enumerate(tasks))
        return {place: tests.reason for place, tests in told if isinstance(tests, Unjudged)}

    async def _judge(self, trajectory: Trajectory) -> Reward | Unjudged:
        tests = _tests(trajectory.task)
        if isinstance(tests, Unjudged):
            return tests
        try:
            unusable, plan = await self.rehearsals.of(tests) if isinstance(tests, Suite) else ("", {})
            if unusable:
                return Unjudged(unusable)
            verdict = await self._verdict(trajectory.last_text, tests, plan)
        except JailFailed as failure:
            return Unjudged(f"the jail: {failure}")
        score = verdict.share if self.options.partial else float(verdict.share == 1.0)
        if verdict.missing:
            self._say_missing(verdict.missing)
        metrics = {f"code/{name}": float(verdict.counts[name]) for name in COUNTED}
        return Reward(score, score=score, metrics=metrics, feedback=verdict.first or None)

    async def _verdict(self, answer: str, tests: Tests, plan: Plan) -> Verdict:
        """Returns the verdict of an answer. Whatever it makes go wrong is its own fault, and of no other row."""
        try:
            code = solution_of(answer, tests.before, tests.header) if isinstance(tests, Suite) else solution_of(answer, "")
            told = await self.runner.tests(code, tests, first_only=not self.options.partial, plan=plan)
            return await asyncio.to_thread(verdict_of, told, tests)
        except JailFailed:
            raise
        except Exception as error:
            log.debug("code_exec: an answer cannot be judged", exc_info=True)
            verdict = Verdict()
            verdict.count("errors", f"{type(error).__name__} while it was judged")
            return verdict

    def _say_missing(self, module: str) -> None:
        if module not in self._missing and len(self._missing) < MOST_WARNINGS:
            self._missing.add(module)
            log.warning(
                "code_exec: programs import %s, which %s does not have; they count as wrong. Another interpreter may have it:"
                " --reward.code_exec.python PATH",
                module,
                self.runner.python,
            )


@dataclass(slots=True)
class Verdict:
    share: float = 0.0
    """Share of the tests that passed."""
    counts: Counter[str] = field(default_factory=Counter)
    """Reasons of failed tests, with their numbers."""
    missing: str = ""
    """A module that the interpreter does not have."""
    first: str = ""
    """Words about the first test that failed."""

    def count(self, reason: str, text: str = "") -> None:
        found = MISSING_MODULE.search(text)
        self.counts["missing_modules" if found else reason] += 1
        self.first = self.first or f"{SAID[reason]} {text}".strip()
        self.missing = found[1] if found else self.missing


def verdict_of(told: dict[str, Any], tests: Tests) -> Verdict:
    """Returns the jail's results as a verdict."""
    verdict = Verdict()
    if isinstance(tests, Programs):
        _judge_outputs(verdict, told["results"], tests.outputs)
        return verdict
    [result] = told["results"]
    try:
        said = json.loads(result["verdict"])
    except ValueError:  # it took too long, or used up what the judge has, as by endless values
        verdict.count("timeouts" if result["why"] == "late" else "errors")
        return verdict
    if said.get("failed"):
        verdict.share = said.get("passed", 0) / said.get("of", 1)
        verdict.count("wrong" if said.get("wrong") else "errors", said["failed"])
    else:
        verdict.share = said["passed"] / said["of"]
    return verdict


def _judge_outputs(verdict: Verdict, results: Sequence[dict[str, Any]], outputs: Sequence[str]) -> None:
    right = 0
    for result, wanted in zip(results, outputs, strict=False):
        if result["why"] == "late":
            verdict.count("timeouts")
        elif result["why"] != "ended" or result["code"] != 0:
            verdict.count("errors", result["stderr"][-1000:])
        elif same_output(result["stdout"], wanted):
            right += 1
        else:
            verdict.count("wrong")
    verdict.share = right / len(outputs)


def _tests(task: Task) -> Tests | Unjudged:
    try:
        return tests_of(task)
    except ValueError as error:
        return Unjudged(f"the task: {error}")
    except (TypeError, MemoryError, RecursionError) as error:
        return Unjudged(f"the task: its tests cannot be read: {type(error).__name__}: {error}")
