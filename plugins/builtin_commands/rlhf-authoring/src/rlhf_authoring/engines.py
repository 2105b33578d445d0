"""Engines and trainers for tests: one that answers as a script says, and the two ends of a weight sync in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rlhf_host import Generation, RunError, SampleKey, Sampling
from rlhf_host.internals import LocalSource, ModuleLoader, call_by_path, copy_weights
from rlhf_host.protocols import Buckets


@dataclass(slots=True)
class ScriptedEngine:
    """``script(token_ids, key)`` gives the token ids of a completion; ``calls`` keeps what was asked."""

    script: Callable[[Sequence[int], SampleKey], list[int]]
    version: int = 0
    busy_s: float = 0.0
    calls: list[tuple[tuple[int, ...], Sampling, SampleKey]] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)

    def expect(self, count: int) -> None:
        self.expected.append(count)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        self.calls.append((tuple(token_ids), sampling, key))
        answer = self.script(token_ids, key)
        cut = answer[: sampling.max_new_tokens]
        return Generation(cut, [-0.5] * len(cut), [self.version] * len(cut), "stop" if cut == answer else "length")

    def set_version(self, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        pass


class ModuleEngine(ScriptedEngine):
    """An engine that only holds a model: the trainer's own, or a copy that code named by import path can load into."""

    def __init__(self, model: nn.Module):
        super().__init__(self._refuse)
        self.model = model
        self._loader = ModuleLoader("engine", model, self._replace)

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        """``"package.module:function"(loader, **arguments)`` in a thread."""
        return [await asyncio.to_thread(call_by_path, function, self._loader, arguments)]

    def _refuse(self, token_ids: Sequence[int], key: SampleKey) -> list[int]:
        raise RunError("this engine only holds weights")

    def _replace(self, buckets: Buckets, version: int) -> None:
        self.version = -1
        copy_weights(self.model, buckets)
        self.version = version


class ModuleSource(LocalSource):
    """The ``source`` of a weight sync, with the module at hand, which a run does not give."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.model = model


def module_source(model: nn.Module) -> ModuleSource:
    """A trainer that has ``model``."""
    return ModuleSource(model)
