"""An engine that says what it is told to: for tests of agents, rewards and the loop without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlhf_host.records.episodes import Generation, SampleKey, Sampling


@dataclass(slots=True)
class ScriptedEngine:
    """``script(token_ids, key)`` gives the token ids of a completion; ``calls`` keeps what was asked."""

    script: Callable[[Sequence[int], SampleKey], list[int]]
    version: int = 0
    busy_s: float = 0.0
    logprob: float = -0.5
    calls: list[tuple[tuple[int, ...], Sampling, SampleKey]] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)

    def expect(self, count: int) -> None:
        self.expected.append(count)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        self.calls.append((tuple(token_ids), sampling, key))
        said = self.script(token_ids, key)
        cut = said[: sampling.max_new_tokens]
        return Generation(cut, [self.logprob] * len(cut), [self.version] * len(cut), "stop" if cut == said else "length")

    def set_version(self, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        pass
