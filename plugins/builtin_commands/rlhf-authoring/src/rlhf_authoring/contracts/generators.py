"""Requests that engines and runtimes get alike: many completions at once, some of which are given up, and an end."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from rlhf_authoring.contracts.session import LoopThread
from rlhf_authoring.contracts.subject import Subject, expect
from rlhf_host import Generation, RunError, Sampling, UserError
from rlhf_host.protocols import Generator

PROMPTS = ([5, 6, 7, 8], [9, 10], [5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 17])
USUAL, LONG = Sampling(12), Sampling(400)
"""``LONG`` leaves time to do something in the middle of it."""


class Rig:
    """A generator that was started, and an event loop for it that turns in a thread."""

    def __init__(self, generator: Generator, close: Callable[[], Coroutine[Any, Any, None]], deadline_s: float):
        self.generator, self._close = generator, close
        self._loop = LoopThread(deadline_s)

    def wait(self, work: Coroutine[Any, Any, Any], what: str = "generate") -> Any:
        return self._loop.wait(work, what)

    def sample(
        self, prompts: Sequence[Sequence[int]] = PROMPTS, sampling: Sampling = USUAL, *, expected: int | None = None
    ) -> list[Generation]:
        """A completion of each prompt under keys of its own, all asked for at once."""

        async def together() -> list[Generation]:
            self.generator.expect(len(prompts) if expected is None else expected)
            return list(await asyncio.gather(*self._ask(prompts, sampling)))

        return self.wait(together())

    def _ask(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[asyncio.Future[Generation]]:
        requests = (self.generator.generate(ids, sampling, (7, number, 0)) for number, ids in enumerate(prompts))
        return list(map(asyncio.ensure_future, requests))

    def refusal(self, ids: Sequence[int] = PROMPTS[0], sampling: Sampling = USUAL) -> Exception | None:
        """Returns what it raises for a request, if anything."""
        try:
            self.sample([ids], sampling)
        except (RunError, UserError) as error:
            return error
        return None

    def cancel_every_other(self) -> None:
        """Requests that are given up leave the others as they are, and the generator free."""
        self.sample(sampling=LONG)
        started = time.monotonic()
        before = self.sample(sampling=LONG)
        soon_s = min(0.05, (time.monotonic() - started) / 4)

        async def cancel() -> list[Any]:
            self.generator.expect(len(PROMPTS))
            tasks = self._ask(PROMPTS, LONG)
            await asyncio.sleep(soon_s)
            for task in tasks[::2]:
                task.cancel()
            return list(await asyncio.gather(*tasks, return_exceptions=True))

        others = [one.token_ids for one in self.wait(cancel())[1::2]]
        expect(others == [one.token_ids for one in before[1::2]], "cancelling requests changes others")
        expect(self.refusal() is None, "after requests were cancelled it serves no other")

    def close_with_a_request(self) -> None:
        """``close`` fails what waits; again it does nothing; later requests are refused."""

        async def close() -> list[Any]:
            self.generator.expect(1)
            waiting = self._ask(PROMPTS[:1], LONG)
            await asyncio.sleep(0.02)
            await self._close()
            await self._close()
            return list(await asyncio.gather(*waiting, *self._ask(PROMPTS[:1], LONG), return_exceptions=True))

        try:
            for what, error in zip(("a waiting request", "a request after it"), self.wait(close(), "close"), strict=True):
                expect(isinstance(error, RunError), f"close leaves {what} with {error!r}; raise RunError")
        finally:
            self._loop.close()

    def close(self) -> None:
        try:
            self.wait(self._close(), "close")
        finally:
            self._loop.close()


AnyRig = TypeVar("AnyRig", bound=Rig)
_SHARED: dict[Any, Any] = {}


def shared(subject: Subject, make: Callable[[Subject], AnyRig]) -> AnyRig:
    """The rig that most checks of a subject share, because some take long to start; no other is up beside it."""
    if (id(subject), make) not in _SHARED:
        close_shared()
        _SHARED[id(subject), make] = make(subject)
    return _SHARED[id(subject), make]


@atexit.register
def close_shared() -> None:
    while _SHARED:
        with contextlib.suppress(Exception):  # at exit no thread can be started any more
            _SHARED.popitem()[1].close()
