"""Syncs in which trainer and engines talk to each other: they meet once, then send and receive at every sync."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_host.protocols import SyncTarget, WeightSource
from rlhf_host.weight_sync.remote_sync import TRAINER, RemoteSync

RENDEZVOUS = "rlhf_host.weight_sync.rendezvous"
LOOPBACK = "127.0.0.1"
LEAVE_S = 5.0
"""Seconds that an end may take to leave. A dead end cannot answer, and need not."""


class ConnectedSync(RemoteSync):
    """``module`` has ``join_sender``, ``join_receiver``, ``send`` and ``receive``, which run beside the weights. Engines that
    are behind are connected anew unless they are exactly those of the last sync; so after a failure, too.
    """

    module = ""

    def __init__(self, options: Any):
        super().__init__(options)
        self._trainer: WeightSource | None = None
        self._members: list[SyncTarget] = []
        self._place: tuple[str, int] | None = None
        self._number = 0

    def choose(self, ends: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the values that both sides need to join, from the results of ``describe`` for the trainer (first) and the
        engines.
        """
        raise NotImplementedError

    def address(self, ends: Sequence[Mapping[str, Any]]) -> str | None:
        return LOOPBACK

    async def transfer(self, source: WeightSource, targets: Sequence[SyncTarget], version: int) -> None:
        same = [id(target.engine) for target in targets] == [id(target.engine) for target in self._members]
        if self._trainer is not source or not same:
            await self.release()
            self._trainer, self._members = source, list(targets)
            await self._connect(source, targets)
        self._number += 1
        receive, send = f"{self.module}:receive", f"{self.module}:send"
        jobs = {target.name: target.engine.run(receive, number=self._number, version=version) for target in targets}
        jobs[TRAINER] = source.run(send, number=self._number, **self.options.wire())
        await self.together(f"version {version}", jobs)

    async def _connect(self, source: WeightSource, targets: Sequence[SyncTarget]) -> None:
        jobs = {target.name: target.engine.run(f"{RENDEZVOUS}:describe") for target in targets}
        answers = await self.together("connecting", {TRAINER: source.run(f"{RENDEZVOUS}:describe")} | jobs)
        ends = [answers[TRAINER][0], *(answers[target.name] for target in targets)]
        timeout_s, shared = self.options.timeout_s, self.choose(ends)
        listening = source.run(f"{RENDEZVOUS}:listen", address=self.address(ends), timeout_s=timeout_s)
        host, port = (await self.together("connecting", {TRAINER: listening}))[TRAINER][0]
        self._place = (host, port)
        jobs, first = {TRAINER: source.run(f"{self.module}:join_sender", timeout_s=timeout_s, **shared)}, 0
        for target, engine in zip(targets, ends[1:], strict=True):
            jobs[target.name] = target.engine.run(
                f"{self.module}:join_receiver", host=host, port=port, first=first, timeout_s=timeout_s, **shared
            )
            first += engine["size"]
        await self.together("connecting", jobs)

    async def release(self) -> None:
        trainer, members, place = self._trainer, self._members, self._place
        self._trainer, self._members, self._place = None, [], None
        if trainer is None:
            return
        if place is not None:
            from rlhf_host.weight_sync.rendezvous import stop_waiting

            await asyncio.to_thread(stop_waiting, *place)
        ends = (trainer, *(target.engine for target in members))
        leaving = [asyncio.ensure_future(end.run(f"{RENDEZVOUS}:leave")) for end in ends]
        await asyncio.wait(leaving, timeout=LEAVE_S)
        for task in leaving:
            if not task.done():
                task.cancel()
            elif not task.cancelled():
                task.exception()  # nothing to be done about it
