"""The policy as an episode sees it: tokens or messages in, an answer out, and every call in the episode's tree."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from rlhf_host.data.codec import ChatCodec
from rlhf_host.errors import RunError
from rlhf_host.records.endpoints import Endpoint
from rlhf_host.records.episodes import Episode, Generation, Message, SampleKey, Sampling, Trajectory
from rlhf_host.records.messages import Reply
from rlhf_host.rollouts.conversation import Call, Plan, Tree


class Endpoints(Protocol):
    """Where base URLs come from: ``serving.endpoints``."""

    async def open(self, policy: EpisodePolicy) -> Any:
        """A base URL for the policy."""

    def close_session(self, session: Any) -> None:
        """It is over: later requests find nothing."""


Generate = Callable[[Sequence[int], Sampling, SampleKey], Awaitable[Generation]]

MOST = 1 << 62
"""Above the number of every call."""
FIRST_CALL_S, NEXT_CALL_S = 1.0, 0.2
"""So long engines wait with a batch for an episode that has asked nothing yet, or has just been answered. Hooks that are called in
turns mostly come back in one time: for them both are the first."""


@dataclass(slots=True)
class Expected:
    """Whether engines wait with a batch for this episode. One that is busy with something else must not hold up the others: it is
    waited for while a call of its own is open, and for a moment before its next one.

    ``add(±1)`` is told of each change; the episode begins as one that is waited for.
    """

    add: Callable[[int], None]
    next_s: float = NEXT_CALL_S
    _open: int = 0
    _counted: bool = True
    _timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._wait(FIRST_CALL_S)

    def asks(self) -> None:
        self._open += 1
        self._set(True)
        if self._timer is not None:
            self._timer.cancel()

    def answered(self) -> None:
        self._open -= 1
        if not self._open:
            self._wait(self.next_s)

    def end(self) -> None:
        """It counts again, as when it began: whoever counts episodes takes it away."""
        if self._timer is not None:
            self._timer.cancel()
        self._set(True)

    def _wait(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._set, False)

    def _set(self, counted: bool) -> None:
        if counted != self._counted:
            self._counted = counted
            self.add(1 if counted else -1)


@dataclass(slots=True)
class EpisodePolicy:
    """``records.Policy`` for one attempt at an episode."""

    episode: Episode
    sampling: Sampling
    max_tokens: int
    """Longest row, prompt included."""
    codec: ChatCodec
    ask: Generate
    """The engine, checked."""
    fitting: Callable[[int], Sampling]
    """The sampling after so many tokens."""
    history: Any = "append"
    expected: Expected | None = None
    endpoints: Endpoints | None = None
    frozen: Mapping[str, Callable[[Episode], EpisodePolicy]] = field(default_factory=dict)
    """Roles that generate."""
    name: str = ""
    """Whose rows these are: ``Trajectory.role``."""
    trainable: bool = True
    tree: Tree = field(init=False)
    served: Any = field(init=False, default=None)
    """The open endpoint, if there is one."""
    forks: list[EpisodePolicy] = field(default_factory=list)
    _asked: Counter[int] = field(default_factory=Counter)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.tree = Tree(self.codec, self.history, self._numbers)

    @property
    def tokenizer(self) -> Any:
        return self.codec.tokenizer

    async def generate(self, token_ids: Sequence[int], sampling: Sampling | None = None) -> Generation:
        call = await self.answer(self.tree.plan_ids(token_ids), sampling)
        assert call.generation is not None
        return call.generation

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        asked = replace(self.sampling, stop=(stop,) if isinstance(stop, str) else tuple(stop))
        if max_new_tokens is not None:
            if max_new_tokens < 1:
                raise ValueError(f"max_new_tokens is {max_new_tokens}, and an answer has one token at least")
            asked = replace(asked, max_new_tokens=max_new_tokens)
        call = await self.complete(messages, tools, asked)
        assert call.reply is not None
        return call.reply

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, sampling: Sampling | None = None
    ) -> Call:
        """``chat``, with all there is to know of the answer."""
        return await self.answer(self.tree.plan(messages, tools), sampling, tools, parsed=True)

    async def answer(
        self,
        plan: Plan,
        sampling: Sampling | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        parsed: bool = False,
        key: SampleKey | None = None,
    ) -> Call:
        """The planned call, answered by the engine."""
        length = len(plan.added) + (plan.parent.ends if plan.parent else 0)
        chosen = self.fitting(length)
        if sampling is not None:
            chosen = _within(sampling, chosen, train=self.trainable and self.episode.split == "train")
        call = self.tree.begin(plan)
        prompt = call.prompt_ids
        if self.expected is not None:
            self.expected.asks()
        try:
            answer = await self.ask(prompt, chosen, key or self._key(prompt))
        except asyncio.CancelledError:
            self.tree.drop(call, "cancelled")
            raise
        except Exception as error:
            self.tree.drop(call, "failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            if self.expected is not None:
                self.expected.answered()
        self.tree.done(call, answer, self.read(call, answer, tools) if parsed else None)
        return call

    def read(self, call: Call, answer: Generation, tools: Sequence[Mapping[str, Any]] | None = None) -> Reply:
        """The answer as a message, its calls with ids."""
        reply = self.codec.parse(answer.token_ids, tools=tools, finish_reason=answer.finish_reason)
        calls = [replace(one, id=self._call_id(call, number)) for number, one in enumerate(reply.tool_calls)]
        return replace(reply, tool_calls=tuple(calls))

    async def endpoint(self) -> Endpoint:
        if self.endpoints is None:
            raise RunError("there is no policy server here")
        if self.served is None:
            self.served = await self.endpoints.open(self)
        return self.served  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close its endpoints, and note what was asked in the episode's log. Raises what ended the engine where a program heard of
        it alone."""
        lost = None
        for policy in self._family():
            if policy.served is not None and policy.endpoints is not None:
                policy.endpoints.close_session(policy.served)
                lost = lost or policy.served.lost
                if policy.served.ignored:
                    self.episode.log("ignored", parameters=dict(policy.served.ignored))
        calls = [(policy, call) for policy in self._family() for call in policy.tree.calls]
        if len(calls) > 1 or self.episode.events:
            self.episode.events += [_event(policy, call) for policy, call in calls]
            self.episode.events.sort(key=lambda event: float(event["t"]))
        if lost is not None:
            raise lost

    def fork(self, role: str = "", *, trainable: bool = True) -> EpisodePolicy:
        fork = replace(self, name=role, trainable=self.trainable and trainable, forks=[])
        self.forks.append(fork)
        return fork

    def role(self, name: str) -> EpisodePolicy:
        if name not in self.frozen:
            raise ValueError(
                f"no role {name!r} generates here; an agent asks for one in needs():"
                f" Needs(roles=(RoleNeed({name!r}, generates=True),))"
            )
        frozen = replace(self.frozen[name](self.episode), name=name, trainable=False, _numbers=self._numbers, forks=[])
        self.forks.append(frozen)
        return frozen

    def trajectories(self, final: str | None = None) -> list[Trajectory]:
        rows: list[Trajectory] = []
        last: dict[str, tuple[int, Trajectory]] = {}
        family = self._family()
        named = next((policy for policy in family if any(call.id == final for call in policy.tree.calls)), None)
        for policy in family:
            added = policy.tree.rows(policy.episode, policy.name, final) if policy.trainable else []
            for row in added:
                row.row += len(rows)
                row.parent = None if row.parent is None else row.parent + len(rows)
                if row.final:
                    row.final = False
                    number = max(call.number for call in policy.tree.calls if call.status == "done")
                    number = MOST if policy is named else number
                    if number > last.get(row.role, (-1, row))[0]:
                        last[row.role] = number, row
            rows += added
        # Beside its own answer, those of its sub-agents are none.
        judged = [last[self.name][1]] if self.name in last else [row for _, row in last.values()]
        for row in judged if named is None or named.name == self.name else [last[named.name][1]]:
            row.final = True
        return rows

    def _family(self) -> list[EpisodePolicy]:
        return [self, *(one for fork in self.forks for one in fork._family())]

    def _key(self, prompt: Sequence[int]) -> SampleKey:
        """Fixed by what is asked, not by when: calls side by side come in any order."""
        digest = hashlib.blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=8, salt=self._salt)
        asked = int.from_bytes(digest.digest(), "big") >> 2
        self._asked[asked] += 1
        return (self.episode.seed, self.episode.sample, asked, self._asked[asked] - 1)

    @property
    def _salt(self) -> bytes:
        return hashlib.blake2b(self.name.encode(), digest_size=16).digest()

    def _call_id(self, call: Call, number: int) -> str:
        """Nine letters and digits, which is what Mistral's template takes; the same in a run that is repeated."""
        text = f"{self.episode.episode_id}/{self.name}/{call.number}/{number}"
        value = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        letters = "0123456789abcdefghijklmnopqrstuvwxyz"
        return "".join(letters[value // 36**place % 36] for place in range(9))


def _event(policy: EpisodePolicy, call: Call) -> dict[str, Any]:
    """A call in the episode's log. Its tokens are in the rows."""
    event: dict[str, Any] = {"kind": "call", "t": round(call.started - policy.episode.began, 6), "id": call.id}
    if policy.name:
        event["role"] = policy.name
    event |= {"why": call.why, "parent": call.parent and call.parent.id, "prompt": call.begins, "s": round(call.seconds, 4)}
    if call.status != "done":
        event |= {"status": call.status, "reason": call.reason}
    if call.generation is not None:
        versions = call.generation.versions
        event |= {"tokens": len(call.generation.token_ids), "finish": call.generation.finish_reason}
        event["versions"] = [min(versions), max(versions)] if versions else []
    if call.reply is not None and call.reply.problems:
        event["problems"] = list(call.reply.problems)
    return event


def _within(asked: Sampling, run: Sampling, *, train: bool) -> Sampling:
    """``asked``, within the run's bounds. Raises ``ValueError`` where it would train on another distribution than the run's."""
    bounds: dict[str, Any] = {
        "max_new_tokens": min(asked.max_new_tokens, run.max_new_tokens),
        "stop": tuple(dict.fromkeys(run.stop + asked.stop)),
        "stop_token_ids": tuple(dict.fromkeys(run.stop_token_ids + asked.stop_token_ids)),
    }
    chosen, trained = replace(asked, **bounds), replace(run, **bounds)
    if train and chosen != trained:
        raise ValueError(
            f"it asks for {_distribution(asked)}, and this run trains on {_distribution(run)}: pass"
            " dataclasses.replace(policy.sampling, ...) with other max_new_tokens or stops only"
        )
    return chosen


def _distribution(sampling: Sampling) -> str:
    return ", ".join(f"{name} {getattr(sampling, name):g}" for name in ("temperature", "top_p", "top_k", "min_p"))
