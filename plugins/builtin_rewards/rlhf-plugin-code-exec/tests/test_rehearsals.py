"""Rehearsals of tasks: once for each, of this task alone, and again after one that failed."""

from __future__ import annotations

import asyncio

import pytest
from rlhf_plugin_code_exec.rehearsals import Rehearsals
from rlhf_plugin_code_exec.runner import JailFailed
from rlhf_plugin_code_exec.suites import suite_of

TESTS = "def test_f():\n    assert f(Node(1)) == 1"


class Told:
    """A runner that says which header a rehearsal had."""

    python = "python"

    def __init__(self):
        self.failing, self.asked = False, 0

    async def rehearsed(self, suite, agrees):
        self.asked += 1
        await asyncio.sleep(0)
        if self.failing:
            raise JailFailed("no jail")
        return {"unusable": suite.header}


def task(header):
    return suite_of("", TESTS, header=header)


def test_each_task_is_rehearsed_once_and_has_its_own_header():
    runner = Told()
    rehearsals, headers = Rehearsals(runner), ["class Node:\n    one = 1", "class Node:\n    two = 2"]

    async def play():
        return await asyncio.gather(*(rehearsals.of(task(header)) for header in headers * 3))

    assert [why for why, _ in asyncio.run(play())] == headers * 3
    assert runner.asked == 2


def test_a_failure_that_nobody_waited_for_is_nobody_elses():
    runner = Told()
    rehearsals, suite = Rehearsals(runner), task("class Node: one = 1")

    async def play():
        runner.failing = True
        waiting = asyncio.create_task(rehearsals.of(suite))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        for _ in range(3):
            await asyncio.sleep(0)
        runner.failing = False
        return await rehearsals.of(suite)

    assert asyncio.run(play())[0] == suite.header
    assert runner.asked == 2
