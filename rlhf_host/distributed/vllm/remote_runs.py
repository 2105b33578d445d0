"""The engine's side of ``worker_runs``: one function in all of an engine's processes, and when they may replace weights."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlhf_host.distributed.vllm.worker_runs import State, unpickled
from rlhf_host.errors import RunError

FIRST_LOOK_S, SLOWEST_LOOK_S = 0.001, 0.02
"""Seconds between looks at a call: the first, and later ones."""


class RemoteRuns:
    """Calls functions in all processes of an engine, at once.

    Args:
        ask: calls a method of ``WorkerRuns`` in every process and returns the results by rank, soon, even while weights load.
        load: ``load(work, version)`` pauses the engine, does ``work`` and gives the weights ``version``; raises if that fails,
            and the engine then has no weights.
    """

    def __init__(self, ask: Callable[..., list[Any]], load: Callable[[Callable[[Callable[..., list[Any]]], None], int], None]):
        self._ask, self._load = ask, load
        self._numbers = itertools.count()

    def run(self, function: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Does the work of ``SyncEnd.run``; waits until all processes are done, or one has failed."""
        number = next(self._numbers)
        self._ask("begin", number, function, dict(arguments))
        try:
            return self._results(number)
        finally:
            with contextlib.suppress(RunError):  # the engine is gone
                self._ask("forget", number)

    def _results(self, number: int) -> list[Any]:
        pause = FIRST_LOOK_S
        while True:
            states = self._ask("look", number)
            results = [unpickled(value) for kind, value in states if kind == "ended"]
            if len(results) == len(states):
                return results
            if all(kind in ("asks", "ended") for kind, _ in states):
                self._let_load(number, states)
                pause = FIRST_LOOK_S
            time.sleep(pause)
            pause = min(2 * pause, SLOWEST_LOOK_S)

    def _let_load(self, number: int, states: list[State]) -> None:
        refusal = ""
        try:
            if len({(kind, value) for kind, value in states}) > 1:
                raise RunError("not all processes of the engine load the same version of the weights")
            self._load(partial(self._loading, number), states[0][1])
        except Exception as error:
            refusal = str(error)
        self._ask("answer", number, refusal)

    @staticmethod
    def _loading(number: int, ask: Callable[..., list[Any]]) -> None:
        """Lets all processes load, and waits until none does. Raises ``RunError`` if one has failed."""
        ask("answer", number, "")
        pause = FIRST_LOOK_S
        while True:
            states = ask("look", number)
            if all(kind != "loads" for kind, _ in states):
                return _check_loaded(states)
            time.sleep(pause)
            pause = min(2 * pause, SLOWEST_LOOK_S)


def _check_loaded(states: list[State]) -> None:
    for kind, value in states:
        if kind == "ended":
            unpickled(value)
        if kind != "loaded":
            raise RunError(str(value or "a process of the engine has broken off"))
