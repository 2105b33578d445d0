"""Weight syncs of others that do not keep the contract: each is named, with what to do."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from rlhf_host.errors import PluginError, RunError, UserError
from rlhf_host.protocols import WeightSyncStart
from rlhf_host.weight_sync.bring import Bring, start_sync


class Sync:
    """Does nothing, but for ``does`` in one of its methods."""

    def __init__(self, method="", does=None):
        self.method, self.does = method, does

    def start(self, start):
        return self

    async def connect(self, targets):
        await self._do("connect")

    async def send(self, source, version):
        await self._do("send")

    async def close(self):
        await self._do("close")

    async def _do(self, method):
        if method == self.method:
            await self.does()


def started(plugin):
    return start_sync(plugin, "weight sync evil", WeightSyncStart(run_dir=None))


class Counting(Sync):
    async def sent(self, source):
        await self._do("sent")
        return source.bytes, 2.0


SOURCE = SimpleNamespace(bytes=8)


def brought(sync):
    async def main():
        bring = Bring(sync, "weight sync evil", "off", None, 1.0, lambda: None)
        await bring([], SOURCE, 0)
        counts = await bring.sent(SOURCE)
        await bring.close()
        return counts

    return asyncio.run(main())


def test_what_was_sent_is_known_of_syncs_that_count_it():
    assert brought(Counting()) == (8, 2.0)
    assert brought(Sync()) == (0, 0.0)


@pytest.mark.parametrize("method", ["connect", "send", "sent", "close"])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("boom"), "weight sync evil failed in {}: ValueError: boom"),
        (SystemExit(0), "weight sync evil failed in {}: SystemExit: 0"),
        (asyncio.CancelledError(), "weight sync evil failed in {}: CancelledError: "),
    ],
)
def test_whatever_a_method_raises_is_its_own(method, error, said):
    async def fails():
        raise error

    with pytest.raises(RunError, match=f"^{said.format(method)}$"):
        brought(Counting(method, fails))


def test_whoever_cancels_the_run_cancels_the_sync_too():
    async def main():
        task = asyncio.create_task(Bring(Sync("send", asyncio.Event().wait), "s", "off", None, 1.0, lambda: None)([], None, 0))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_start_that_fails_or_gives_something_else_is_said():
    def start(does):
        return SimpleNamespace(start=does)

    def breaks(_):
        raise SystemExit(0)

    with pytest.raises(RunError, match="weight sync evil failed in start: SystemExit: 0"):
        started(start(breaks))
    with pytest.raises(PluginError, match="weight sync evil: start returned a NoneType without connect: see"):
        started(start(lambda _: None))
    blocking = SimpleNamespace(connect=Sync().connect, send=lambda source, version: None, close=Sync().close)
    with pytest.raises(PluginError, match="weight sync evil: send is awaited: write async def send"):
        started(start(lambda _: blocking))
    with pytest.raises(UserError, match="no such place"):
        started(start(lambda _: (_ for _ in ()).throw(UserError("no such place"))))
    assert isinstance(started(Sync()), Sync)
