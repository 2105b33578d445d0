"""The episode behind a base URL: its policy, its requests, and the reports of its program."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_host import Message, RoleHandle
from rlhf_host.rollouts import Call, EpisodePolicy, misnamed
from rlhf_server.errors import ApiError, as_api_error, invalid
from rlhf_server.limits import Limits


@dataclass(slots=True, eq=False)
class Session:
    """One attempt at an episode, as the server knows it."""

    policy: EpisodePolicy
    base_url: str
    token: str
    limits: Limits
    shared_url: str = ""
    free: bool = False
    """True if nothing of it is trained, so requests choose the distribution."""
    role: RoleHandle | None = None
    """The model's passes, for log-probabilities of tokens that were not sampled."""
    reward: float | None = None
    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    final: str | None = None
    """Id of the call whose row has the answer, if the program names it."""
    failed: tuple[str, bool] | None = None
    """Reason for which the program gave up, and True if another attempt may succeed."""
    truncated: bool = False
    """True if a call found no room left."""
    lost: Exception | None = None
    """Error that ended the engine, if there was one."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    ignored: Counter[str] = field(default_factory=Counter)
    """Parameters of requests that the run ignores."""
    closed: bool = False
    calls: int = 0
    arrived: set[Call] = field(default_factory=set)
    """Calls whose answer a client has received."""
    responses: dict[str, list[Message]] = field(default_factory=dict)
    """Id of a response → its conversation, for requests that go on from it."""
    _open: set[asyncio.Task[Any]] = field(default_factory=set)
    _answers: dict[bytes, asyncio.Future[list[Call]]] = field(default_factory=dict)

    @property
    def api_key(self) -> str:
        return self.token

    async def ask(self, digest: bytes, again: bool, count: int, work: Callable[[int], Awaitable[Call]]) -> list[Call]:
        """Returns ``count`` answers of the policy.

        Args:
            digest: digest of the request.
            work: returns the answer of this number.
            again: the client has sent the request before and did not get its answer: it joins the open call, or gets the
                earlier answer.

        Raises ``ApiError``.
        """
        while again and (before := self._answers.get(digest)) is not None:
            try:
                calls = await asyncio.shield(before)
            except (ApiError, asyncio.CancelledError):
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                if self._answers.get(digest) is before:
                    break
                continue
            for call in calls:
                if call.status == "undelivered":
                    call.status = "done"
            return calls
        if self.calls + count > self.limits.calls:
            raise ApiError(400, f"the episode has had its {self.limits.calls} calls", "episode_budget")
        if len(self._open) >= self.limits.calls_at_once:
            raise ApiError(429, f"{self.limits.calls_at_once} calls of this episode are open", "overloaded", retry=True)
        self.calls += count
        if len(self._answers) >= self.limits.calls:
            self._answers.pop(next(iter(self._answers)))
        answer = self._answers[digest] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self._together(count, work))
        self._open.add(task)
        try:
            with self.told():
                calls = await task
        except BaseException as error:
            answer.cancel()
            if isinstance(error, asyncio.CancelledError) and self.closed:
                raise ApiError(410, "the episode is over", "episode_over") from error
            raise
        finally:
            self._open.discard(task)
        answer.set_result(calls)
        return calls

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Turns the policy's exceptions into the client's ``ApiError``, and records them."""
        try:
            yield
        except ApiError:
            raise
        except Exception as error:
            told = as_api_error(error, self.policy.max_tokens)
            self.truncated |= told.code == "context_length_exceeded"
            if told.status == 503:
                self.lost = error
            raise told from error

    async def _together(self, count: int, work: Callable[[int], Awaitable[Call]]) -> list[Call]:
        if count == 1:
            return [await work(0)]
        asking = [asyncio.ensure_future(work(number)) for number in range(count)]
        try:
            return list(await asyncio.gather(*asking))
        except BaseException:
            for one in asking:
                one.cancel()
            for done in await asyncio.gather(*asking, return_exceptions=True):
                if isinstance(done, Call):
                    self.policy.tree.drop(done, "undelivered")
            raise

    def remember(self, response: str, messages: list[Message]) -> None:
        if len(self.responses) >= self.limits.calls:
            self.responses.pop(next(iter(self.responses)))
        self.responses[response] = messages

    def report(self, body: Mapping[str, Any]) -> None:
        """Stores the program's reward. Raises ``ApiError`` for an invalid one."""
        reward, score = _number(body, "reward"), _number(body, "score")
        if score is not None and not 0.0 <= score <= 1.0:
            raise invalid("score", f"a score lies in [0, 1], not {score:g}")
        metrics = {} if body.get("metrics") is None else body["metrics"]
        if not isinstance(metrics, Mapping):
            raise invalid("metrics", "an object of numbers")
        if problem := misnamed({**self.metrics, **metrics}):
            raise invalid("metrics", problem)
        given = {name: _number(metrics, name) for name in metrics}
        final = body.get("final")
        if final is not None:
            final = str(final).removeprefix("resp_").removeprefix("msg_")
            if final not in {call.id for call in self.policy.tree.calls if call.status == "done"}:
                raise invalid("final", f"the episode has no answered call {final!r}")
        self.reward = reward if reward is not None else self.reward
        self.score = score if score is not None else self.score
        self.metrics |= {name: value for name, value in given.items() if value is not None}
        self.final = final or self.final

    def fail(self, body: Mapping[str, Any]) -> None:
        self.failed = (str(body.get("reason") or "the program gave up"), body.get("retryable") is True)
        self.done.set()

    def close(self) -> None:
        """Closes the session: later requests find nothing, open ones are cancelled."""
        self.closed = True
        for task in list(self._open):
            task.cancel()


def _number(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise invalid(name, f"a finite number, not {str(value)[:60]}")
    return number


def new_token(bits: int = 128) -> str:
    return secrets.token_urlsafe(bits // 8)
