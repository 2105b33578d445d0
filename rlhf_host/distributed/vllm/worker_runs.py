"""Functions beside an engine's weights, in a process that also computes for the engine: each runs in a thread of its own, so the
process answers meanwhile, and asks the engine before it replaces weights.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from rlhf_host.distributed.bits import note_bits
from rlhf_host.engines.loading import call_by_path
from rlhf_host.errors import RunError, first_line, in_one_line
from rlhf_host.protocols import Buckets

GIVEN_UP = "stopped, because another process of the engine failed"
State = tuple[str, Any]
"""Progress of a call: ``runs``; ``asks`` to load, with the version; ``loads``; ``loaded``, and waits for the engine; ``failed`` to
load, with the reason; ``ended``, with ``pickled`` of its result. Plain values.
"""


@dataclass(slots=True)
class WorkerRuns:
    """The calls of one process, by their numbers. Its methods return at once.

    Args:
        replace: replaces all of the process's weights and returns what ``note_bits`` keeps; raises if some are missing.
    """

    engine: str
    rank: int
    size: int
    device: torch.device
    replace: Callable[[Buckets], dict[str, int] | None]
    weight_types: Callable[[], tuple[str, tuple[str, ...]] | None] = lambda: None
    """Returns ``WeightTypes.weight_types``."""
    state: dict[str, Any] = field(default_factory=dict)
    runs: dict[int, _Run] = field(default_factory=dict)

    def begin(self, number: int, function: str, arguments: Mapping[str, Any]) -> None:
        self.runs[number] = run = _Run(self)
        threading.Thread(target=run.call, args=(function, arguments), name="rlhf-beside-weights", daemon=True).start()

    def look(self, number: int) -> State:
        """Returns how far the call is."""
        return self.runs[number].now

    def answer(self, number: int, refusal: str) -> None:
        """Lets a call that asks or has loaded go on; with a refusal its ``load`` raises ``RunError``."""
        if (run := self.runs.get(number)) is not None and run.now[0] in ("asks", "loaded"):
            run.now = ("loads", None) if run.now[0] == "asks" and not refusal else ("runs", None)
            run.answers.put(refusal)

    def forget(self, number: int) -> None:
        """Forgets a call. If it has not ended, it may load no more."""
        self.runs.pop(number).give_up()


class _Run:
    """One call, and the ``Loader`` that its function gets."""

    def __init__(self, home: WorkerRuns):
        self.engine, self.rank, self.size, self.device, self.state = home.engine, home.rank, home.size, home.device, home.state
        self.now: State = ("runs", None)
        self.answers: SimpleQueue[str] = SimpleQueue()
        self._home, self._given_up = home, False

    @property
    def weight_types(self) -> tuple[str, tuple[str, ...]] | None:
        return self._home.weight_types()

    def load(self, buckets: Buckets, version: int) -> None:
        self._wait_in(("asks", version))
        try:
            note_bits(self.state, self._home.replace(buckets))
        except Exception as error:
            # Raised at once: the engine's other processes may wait for what this one was to say.
            self.now = ("failed", first_line(error))
            if isinstance(error, RunError):
                raise
            raise RunError(f"engine {self.engine}: loading version {version} failed ({first_line(error)})") from error
        self._wait_in(("loaded", version))

    def give_up(self) -> None:
        self._given_up = True
        self.answers.put(GIVEN_UP)

    def call(self, function: str, arguments: Mapping[str, Any]) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # threads begin on the first
            result = pickled(True, call_by_path(function, self, arguments))
        except BaseException as error:
            result = pickled(False, error)
        self.now = ("ended", result)

    def _wait_in(self, state: State) -> None:
        self.now = state
        if refusal := GIVEN_UP if self._given_up else self.answers.get():
            raise RunError(refusal)


def pickled(good: bool, value: Any) -> bytes:
    """Returns result or error for ``unpickled``; an error that does not survive the way becomes a ``RunError``."""
    try:
        data = pickle.dumps((good, value))
        pickle.loads(data)
        return data
    except Exception as error:
        return pickle.dumps((False, RunError(in_one_line(error if good else value))))


def unpickled(data: bytes) -> Any:
    """Returns the result, or raises the error. ``data`` comes from a process of this engine."""
    good, value = pickle.loads(data)
    if not good:
        raise value
    return value
