"""Rehearsals: find once for each task, without a solution, which of its tests run and whether they can be used."""

from __future__ import annotations

import asyncio
from typing import Any

from rlhf_plugin_code_exec.runner import Runner
from rlhf_plugin_code_exec.suites import Suite

MOST = 4096
"""Maximum number of tasks whose rehearsals are remembered."""
Plan = dict[str, "list[int] | None"]
"""Test → number of its cases, and of those that run; or ``None`` if the solution decides how many there are."""


class Rehearsals:
    def __init__(self, runner: Runner):
        self.runner = runner
        self._done: dict[tuple[str, ...], tuple[str, Plan]] = {}
        self._running: dict[tuple[str, ...], asyncio.Task[tuple[str, Plan]]] = {}

    async def of(self, suite: Suite) -> tuple[str, Plan]:
        """Returns why the tests cannot be used, or nothing, and their plan. Raises ``JailFailed``."""
        if suite.plain:
            return "", {}
        key = (suite.setup, suite.tests, suite.header, self.runner.python)
        if key not in self._done:
            task = self._running.get(key)
            if task is None or task.done() or task.get_loop() is not asyncio.get_running_loop():
                task = self._running[key] = asyncio.create_task(self._rehearsed(suite))
                task.add_done_callback(lambda done: done.cancelled() or done.exception())  # who waits for it may be gone
            try:
                self._done[key] = await asyncio.shield(task)
            finally:
                if task.done() and self._running.get(key) is task:
                    self._running.pop(key, None)
            while len(self._done) > MOST:
                self._done.pop(next(iter(self._done)))
        return self._done[key]

    async def _rehearsed(self, suite: Suite) -> tuple[str, Plan]:
        told = await self.runner.rehearsed(suite, agrees=True)
        if "unusable" in told:
            return str(told["unusable"]), {}
        plan: dict[str, Any] = told.get("plan", {})
        if any(each != [1, 1] for each in plan.values()):
            plan = _merged(plan, (await self.runner.rehearsed(suite, agrees=False)).get("plan", {}))
        tests = [each for name, each in plan.items() if name != "its end, before its last line"]
        if suite.collect and tests and not suite.called and not any(each is None or each[1] for each in tests):
            return "no test of its file runs: all are marked to be skipped", {}
        return "", plan


def _merged(yes: Plan, no: Plan) -> Plan:
    """Returns the plan of two rehearsals: what either runs must run."""
    plan: Plan = {}
    for name in {**yes, **no}:
        one, other = yes.get(name) or no[name], no.get(name) or yes[name]
        plan[name] = [one[0], max(one[1], other[1])] if one and other and one[0] == other[0] else None
    return plan
