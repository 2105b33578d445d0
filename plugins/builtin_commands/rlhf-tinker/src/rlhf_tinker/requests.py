"""Requests whose results clients fetch later: known by an id, sent twice and done once, in the order of their numbers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlhf_server import ApiError

from rlhf_host import RunError, UserError

WAIT_S = 20.0
"""Seconds after which a client that waits for a result is told to ask again."""
KEPT = 20_000
"""Finished requests whose results are kept."""
KEPT_BYTES = 512 << 20
"""Bytes of results in protobuf that are kept."""
GAP_S = 120.0
"""Seconds after which a request fails that waits for one with an earlier number."""
AHEAD = 4096
"""Requests of one model that may wait."""

Result = dict[str, Any] | bytes
"""JSON, or a message in protobuf."""
Work = Callable[[], Awaitable[Result]]
Missed = Callable[[str], Awaitable[None]]
"""Takes why a request is not done."""


def failure(error: BaseException) -> dict[str, str]:
    """Returns an error as clients read one: by whom it was caused, and its text."""
    if isinstance(error, ApiError):
        return {"error": error.message, "category": "user" if error.status < 500 else "server"}
    text = " ".join(str(error).split()) or type(error).__name__
    category = "user" if isinstance(error, UserError | ValueError) else "server"
    known = isinstance(error, UserError | RunError | ValueError)
    return {"error": text if known else f"{type(error).__name__}: {text}", "category": category}


@dataclass(slots=True, eq=False)
class Pending:
    """A request and its result."""

    request_id: str
    digest: Hashable
    done: asyncio.Future[Result]
    about: dict[str, Any] = field(default_factory=dict)
    """Values of the first answer beside the id."""


class Requests:
    """All requests of a server."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Pending] = OrderedDict()
        self._bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, request_id: str, digest: Hashable, about: dict[str, Any] | None = None) -> tuple[Pending, bool]:
        """Returns a request, and True if it is new: clients that heard no answer send it again. Raises ``ApiError`` for another
        request of the same id.
        """
        if (known := self._known.get(request_id)) is not None:
            if known.digest != digest:
                raise ApiError(400, f"{request_id[:120]} was another request: numbers are used once", "used_twice", "seq_id")
            return known, False
        pending = Pending(request_id, digest, asyncio.get_running_loop().create_future(), about or {})
        self._known[request_id] = pending
        return pending, True

    def start(self, pending: Pending, work: Work) -> None:
        task = asyncio.create_task(self._finish(pending, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def fail(self, pending: Pending, error: BaseException) -> None:
        self._set(pending, failure(error))

    async def _finish(self, pending: Pending, work: Work) -> None:
        try:
            self._set(pending, await work())
        except asyncio.CancelledError:
            self.fail(pending, RunError("the server ends"))
            raise
        except Exception as error:
            self.fail(pending, error)

    def _set(self, pending: Pending, result: Result) -> None:
        if pending.done.done():
            return
        pending.done.set_result(result)
        self._bytes += len(result) if isinstance(result, bytes) else 0
        for request_id in [*self._known] if len(self._known) > KEPT or self._bytes > KEPT_BYTES else ():
            if len(self._known) <= KEPT and self._bytes <= KEPT_BYTES:
                break
            old = self._known[request_id]
            if old.done.done() and old is not pending:
                del self._known[request_id]
                gone = old.done.result()
                self._bytes -= len(gone) if isinstance(gone, bytes) else 0

    async def result(self, request_id: str, wait_s: float = WAIT_S) -> Result | None:
        """Returns a result, or None if there is none yet. Raises ``ApiError`` for an unknown request."""
        if (pending := self._known.get(request_id)) is None:
            raise ApiError(
                404,
                f"there is no request {request_id[:120]!r}: the server was started anew, or its result is too old",
                "not_found",
            )
        await asyncio.wait([pending.done], timeout=wait_s)
        return pending.done.result() if pending.done.done() else None

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Line:
    """Requests of one model, done in the order of their numbers, whatever the order in which they arrive."""

    def __init__(self, requests: Requests):
        self._requests = requests
        self._next = 1
        self._waiting: dict[int, tuple[Pending, Work, Missed]] = {}
        self._last: asyncio.Task[None] | None = None

    def add(self, number: int, pending: Pending, work: Work, missed: Missed) -> None:
        """Adds a request.

        Args:
            missed: done in place of ``work`` if a request before it does not come. Later ones begin after it.

        Raises ``ApiError`` for a number that was passed over, and for too many requests.
        """
        if number < self._next:
            raise ApiError(400, f"seq_id {number} comes after {self._next - 1}", "invalid_value", "seq_id")
        if len(self._waiting) >= AHEAD:
            raise ApiError(429, "too many requests of this model are waiting", "overloaded")
        self._waiting[number] = pending, work, missed
        self._go_on()
        if number in self._waiting:
            asyncio.get_running_loop().call_later(GAP_S, self._give_up, number)

    def _go_on(self) -> None:
        while (item := self._waiting.pop(self._next, None)) is not None:
            self._next += 1
            self._requests.start(item[0], self._after(item[1]))

    def _after(self, work: Work) -> Work:
        """Returns work that begins when the work before it has ended."""
        before, done = self._last, asyncio.get_running_loop().create_future()
        self._last = done  # type: ignore[assignment]

        async def run() -> Result:
            try:
                if before is not None:
                    await asyncio.wait([before])
                return await work()
            finally:
                done.set_result(None)

        return run

    async def _refuse(self, late: int, missing: int, missed: Missed) -> Result:
        await missed(f"request {missing} did not come")
        raise RunError(f"request {late} waited for {missing}, which did not come in {GAP_S:g} s")

    def _give_up(self, number: int) -> None:
        if number not in self._waiting:
            return
        missing = self._next
        for late in sorted(self._waiting):
            if late <= number:
                pending, _, missed = self._waiting.pop(late)
                self._requests.start(pending, self._after(partial(self._refuse, late, missing, missed)))
                self._next = late + 1
        self._go_on()
