"""The policy as an episode sees it: tokens or messages in, an answer out, and every call in the episode's tree."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from rlhf_host.data.codec import ChatCodec, with_pictures
from rlhf_host.data.processor import Processor
from rlhf_host.errors import RunError
from rlhf_host.protocols import Server, ServerSession
from rlhf_host.records.endpoints import Endpoint
from rlhf_host.records.episodes import Episode, Generation, Message, NoRoom, SampleKey, Sampling, Task, Trajectory
from rlhf_host.records.messages import Reply
from rlhf_host.records.pictures import Pictured, images_of, with_images
from rlhf_host.records.sampling import misfit
from rlhf_host.rollouts.conversation import Call, Plan, Tree
from rlhf_host.rollouts.episode_settings import EpisodeSettings


class PolicyHost(Protocol):
    """Methods of ``Episodes`` that a policy needs."""

    @property
    def settings(self) -> EpisodeSettings: ...

    @property
    def vocabulary(self) -> int:
        """Number of the model's tokens."""

    @property
    def endpoints(self) -> Server | None:
        """Endpoints; None: there is no policy server here."""

    def frozen_role(self, name: str, episode: Episode) -> PolicyHost:
        """Returns the role that answers where an episode asks for ``name``. Raises ``ValueError`` if it does not generate."""

    def codec_of(self, task: Task) -> ChatCodec:
        """Returns the codec of the task's conversations."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        """Returns the engine's answer, checked."""


MOST = 1 << 62
"""Limit above the number of every call."""
FIRST_CALL_S, NEXT_CALL_S = 1.0, 0.2
"""Seconds that engines wait with a batch for an episode that has not asked yet, and for one that was just answered. Hooks that
are called in turn mostly return in the first time, so both are then the first.
"""


@dataclass(slots=True)
class Expected:
    """Counter of whether engines wait with a batch for this episode. An episode that is busy with something else must not delay
    the others: engines wait for it while a call of its own is open, and for a moment before its next one.

    ``add(±1)`` is called at each change.
    """

    add: Callable[[int], None]
    next_s: float = NEXT_CALL_S
    _open: int = 0
    _counted: bool = False
    _over: bool = False
    _timer: asyncio.TimerHandle | None = None

    def wait(self, seconds: float) -> None:
        """Lets engines wait so long for the next call."""
        if not self._over:
            self._set(True)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._set, False)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Lets engines wait while a call is open, and for a moment after the last one."""
        self._open += 1
        self._set(True)
        if self._timer is not None:
            self._timer.cancel()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self.wait(self.next_s)

    def close(self) -> None:
        """Lets engines wait no more. A call that lasts longer changes nothing."""
        if self._timer is not None:
            self._timer.cancel()
        self._set(False)
        self._over = True

    def _set(self, counted: bool) -> None:
        if counted != self._counted and not self._over:
            self._counted = counted
            self.add(1 if counted else -1)


@dataclass(slots=True)
class EpisodePolicy:
    """``records.Policy`` for one attempt at an episode."""

    episode: Episode
    host: PolicyHost
    _: KW_ONLY
    expected: Expected | None = None
    name: str = ""
    """Role of its rows: ``Trajectory.role``."""
    trainable: bool = True
    sampling: Sampling = field(init=False)
    codec: ChatCodec = field(init=False)
    tree: Tree = field(init=False)
    served: ServerSession | None = field(init=False, default=None)
    """The open endpoint, if there is one."""
    forks: list[EpisodePolicy] = field(default_factory=list)
    _asked: Counter[int] = field(default_factory=Counter)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        settings = self.host.settings
        self.sampling, self.codec = settings.sampling, self.host.codec_of(self.episode.task)
        self.tree = Tree(self.codec, settings.rollout.history, self._numbers)

    @property
    def max_tokens(self) -> int:
        """Longest row, prompt included."""
        return self.host.settings.max_tokens

    @property
    def vocabulary(self) -> int:
        """Number of the model's tokens, which may be more than its tokenizer has."""
        return self.host.vocabulary

    @property
    def tokenizer(self) -> Any:
        return self.codec.tokenizer

    async def generate(self, token_ids: Sequence[int], sampling: Sampling | None = None) -> Generation:
        if problem := "there are none" if not len(token_ids) else foreign(token_ids, self.vocabulary):
            raise ValueError(f"token_ids: {problem}")
        call = await self.answer(self.tree.plan_ids(self._with_sight(token_ids)), sampling)
        assert call.generation is not None
        return call.generation

    def _with_sight(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Returns tokens that begin with the task's prompt with the pictures of this. Raises ``ValueError`` for other tokens of
        pictures without pictures.
        """
        task = self.episode.task
        if isinstance(token_ids, Pictured) or not task.images:
            return token_ids
        prompt = list(task.prompt_ids or ())
        if prompt and list(token_ids[: len(prompt)]) == prompt:
            return Pictured(token_ids, task.images)
        if Processor.of(self.tokenizer).placeholder in token_ids:
            raise ValueError("token_ids: they have tokens of pictures, and no pictures: give rlhf_host.Pictured(ids, images)")
        return token_ids

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
            asked = replace(asked, max_new_tokens=max_new_tokens)
        call = await self.complete(messages, tools, asked)
        assert call.reply is not None
        return call.reply

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, sampling: Sampling | None = None
    ) -> Call:
        """Returns the same as ``chat``, with all details of the answer."""
        return await self.answer(self.tree.plan(with_pictures(messages), tools), sampling, tools, parsed=True)

    async def answer(
        self,
        plan: Plan,
        sampling: Sampling | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        parsed: bool = False,
        key: SampleKey | None = None,
    ) -> Call:
        """Returns the engine's answer to the planned call."""
        length = len(plan.added) + (plan.parent.ends if plan.parent else 0)
        chosen, most = self.host.settings.sampling, self.host.settings.max_tokens
        room = most - length
        if room <= 0:
            raise NoRoom(f"the prompt has {length} tokens; no room is left of max_tokens {most}")
        chosen = replace(chosen, max_new_tokens=min(room, chosen.max_new_tokens))
        if sampling is not None:
            if problem := misfit(sampling):
                raise ValueError(problem)
            chosen = _within(sampling, chosen, train=self.trainable and self.episode.split == "train")
        call = self.tree.begin(plan)
        prompt = with_images(call.prompt_ids, call.prompt_shown)
        try:
            with self.expected.asking() if self.expected is not None else nullcontext():
                answer = await self.host.generate(prompt, chosen, key or self._key(prompt))
        except asyncio.CancelledError:
            self.tree.drop(call, "cancelled")
            raise
        except Exception as error:
            self.tree.drop(call, "failed", f"{type(error).__name__}: {error}")
            raise
        self.tree.done(call, answer, self.read(call, answer, tools) if parsed else None)
        if parsed and sampling is not None and sampling.stop:
            self.tree.show(call, self._shown(call, tools, sampling.stop))
        return call

    def read(self, call: Call, answer: Generation, tools: Sequence[Mapping[str, Any]] | None = None) -> Reply:
        """Returns the answer as a message, its calls with ids."""
        return self._read(call, answer, tools)

    def _read(
        self, call: Call, answer: Generation, tools: Sequence[Mapping[str, Any]] | None, stop: Sequence[str] = ()
    ) -> Reply:
        reply = self.codec.parse(answer.token_ids, tools=tools, finish_reason=answer.finish_reason, stop=stop)
        calls = [replace(one, id=self._call_id(call, number)) for number, one in enumerate(reply.tool_calls)]
        return replace(reply, tool_calls=tuple(calls))

    def _shown(self, call: Call, tools: Sequence[Mapping[str, Any]] | None, stop: Sequence[str]) -> Reply:
        """Returns the answer without the stop text that ended it. A stop text that is part of a call stays in the call."""
        assert call.reply is not None
        assert call.generation is not None
        cut = self._read(call, call.generation, tools, stop)
        return call.reply if call.reply.tool_calls and not cut.tool_calls else cut

    async def endpoint(self) -> Endpoint:
        if self.host.endpoints is None:
            raise RunError("there is no policy server here")
        if self.served is None:
            self.served = await self.host.endpoints.open(self)
        return self.served

    def close(self) -> None:
        """Closes its endpoints, and adds the requests to the episode's log. Raises an error that ended the engine if only a
        program received it.
        """
        lost = None
        for policy in self._family():
            if policy.served is not None and policy.host.endpoints is not None:
                policy.host.endpoints.close_session(policy.served)
                lost = lost or policy.served.lost
                if policy.served.ignored:
                    self.episode._note("ignored", parameters=dict(policy.served.ignored))
        calls = [(policy, call) for policy in self._family() for call in policy.tree.calls]
        if len(calls) > 1 or self.episode.events:
            self.episode.events += [_event(policy, call) for policy, call in calls]
            self.episode.events.sort(key=lambda event: float(event["t"]))
        if lost is not None:
            raise lost

    def fork(self, role: str = "", *, trainable: bool = True) -> EpisodePolicy:
        fork = replace(self, name=role, trainable=self.trainable and trainable, forks=[])
        fork.sampling = self.sampling
        self.forks.append(fork)
        return fork

    def role(self, name: str) -> EpisodePolicy:
        host = self.host.frozen_role(name, self.episode)
        frozen = EpisodePolicy(self.episode, host, name=name, trainable=False, _numbers=self._numbers)
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
        """Returns a key that depends on the request and not on its time, because parallel calls come in any order."""
        seen = "".join(picture.key for picture in images_of(prompt)).encode()
        digest = hashlib.blake2b(np.asarray(prompt, np.int32).tobytes() + seen, digest_size=8, salt=self._salt)
        asked = int.from_bytes(digest.digest(), "big") >> 2
        self._asked[asked] += 1
        return (self.episode.seed, self.episode.sample, asked, self._asked[asked] - 1)

    @property
    def _salt(self) -> bytes:
        return hashlib.blake2b(self.name.encode(), digest_size=16).digest()

    def _call_id(self, call: Call, number: int) -> str:
        """Returns nine letters and digits, as Mistral's template requires; the same in a repeated run."""
        text = f"{self.episode.episode_id}/{self.name}/{call.number}/{number}"
        value = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        letters = "0123456789abcdefghijklmnopqrstuvwxyz"
        return "".join(letters[value // 36**place % 36] for place in range(9))


def foreign(token_ids: Sequence[int], vocabulary: int) -> str:
    """Returns why no model can read these tokens; empty if it can."""
    ids = np.asarray(token_ids)
    if ids.size and (ids.ndim != 1 or ids.dtype.kind not in "iu" or not 0 <= ids.min() <= ids.max() < vocabulary):
        return f"tokens are whole numbers from 0 to {vocabulary - 1}, not {reprlib.repr(token_ids)}"
    return ""


def _event(policy: EpisodePolicy, call: Call) -> dict[str, Any]:
    """Returns a call as an entry of the episode's log. Its tokens are in the rows."""
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
    """Returns ``asked`` within the run's bounds. Raises ``ValueError`` if it would train on another distribution than the
    run's.
    """
    bounds: dict[str, Any] = {
        "max_new_tokens": min(asked.max_new_tokens, run.max_new_tokens),
        "stop": tuple(dict.fromkeys(run.stop + asked.stop)),
        "stop_token_ids": tuple(dict.fromkeys(run.stop_token_ids + asked.stop_token_ids)),
        "support": run.support,
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
