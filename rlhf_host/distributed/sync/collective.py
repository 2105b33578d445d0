"""Syncs in which trainer and engines talk to each other: they meet once, plan who sends to whom, then send and receive at every
sync.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from rlhf_host.distributed.sync.remote import TRAINER, RemoteSync, SyncOptions, ask, wire_types
from rlhf_host.distributed.sync.transfer_plan import Place, Route
from rlhf_host.protocols import SyncTarget, WeightSource

log = logging.getLogger(__name__)

RENDEZVOUS, TRANSFER = "rlhf_host.distributed.sync.rendezvous", "rlhf_host.distributed.sync.transfer"
LOOPBACK = "127.0.0.1"
LEAVE_S = 5.0
"""Seconds that an end may take to leave. A dead end cannot answer, and need not."""


class ConnectedOptions(SyncOptions):
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="type in which floating-point weights are sent; auto: the engines', or the trainer's if it is shorter",
    )


class ConnectedSync(RemoteSync):
    """Sends by the routes of a plan. Engines that are behind are connected anew unless they are exactly those of the last sync; so
    after a failure, too.
    """

    def __init__(self, options: Any):
        super().__init__(options)
        self._trainer: WeightSource | None = None
        self._members: list[SyncTarget] = []
        self._meeting: tuple[str, int] | None = None
        self._number = 0
        self._sending: dict[str, Any] = {}
        self._said: set[str] = set()

    def plan(self, trainer: Sequence[Place], engines: Sequence[Place], names: Sequence[str]) -> Sequence[Route]:
        """Returns the routes from the trainer's ranks to the engines' processes; ``names`` are the engines' of these processes."""
        raise NotImplementedError

    def address(self, one_machine: bool) -> str | None:
        """Returns the address that the trainer listens on; ``None``: its network address."""
        return LOOPBACK if one_machine else None

    async def transfer(self, source: WeightSource, targets: Sequence[SyncTarget], version: int) -> None:
        same = [id(target.engine) for target in targets] == [id(target.engine) for target in self._members]
        if self._trainer is not source or not same:
            await self.release()
            self._trainer, self._members = source, list(targets)
            await self._connect(source, targets)
        self._number += 1
        receive, number = f"{TRANSFER}:receive", self._number
        jobs: dict[str, Any] = {target.name: ask(target, receive, number=number, version=version) for target in targets}
        jobs[TRAINER] = source.run(f"{TRANSFER}:send", number=number, **self._sending)
        await self.together(f"version {version}", jobs)

    async def _connect(self, source: WeightSource, targets: Sequence[SyncTarget]) -> None:
        describe = f"{RENDEZVOUS}:describe"
        jobs = {TRAINER: source.run(describe)} | {target.name: ask(target, describe) for target in targets}
        ends = await self.together("connecting", jobs)
        places = {name: [Place(**one["place"]) for one in described] for name, described in ends.items()}
        names = [target.name for target in targets for _ in places[target.name]]
        engines = [place for target in targets for place in places[target.name]]
        routes = self.plan(places[TRAINER], engines, names)
        self._say_detours(routes, names, [*places[TRAINER], *engines])
        kept = [one["kept"] for target in targets for one in ends[target.name]]
        sending = self.options.wire()
        wire = wire_types(sending.pop("dtype"), kept)
        self._sending = sending | {"everywhere": any(route.sender for route in routes), "wire": wire}
        timeout_s, one_machine = self.options.timeout_s, len({place.machine for place in [*places[TRAINER], *engines]}) == 1
        listening = source.run(f"{RENDEZVOUS}:listen", address=self.address(one_machine), timeout_s=timeout_s)
        host, port = (await self.together("connecting", {TRAINER: listening}))[TRAINER][0]
        self._meeting = (host, port)
        shared = {"host": host, "port": port, "routes": [route.to_plain() for route in routes], "timeout_s": timeout_s}
        jobs, first = {TRAINER: source.run(f"{TRANSFER}:join_sender", **shared)}, 0
        for target in targets:
            jobs[target.name] = ask(target, f"{TRANSFER}:join_receiver", first=first, **shared)
            first += len(places[target.name])
        await self.together("connecting", jobs)

    def _say_detours(self, routes: Sequence[Route], names: Sequence[str], places: Sequence[Place]) -> None:
        """Logs, once, which engines get weights in a slow way, and why."""
        level = logging.WARNING if any(place.gpu is not None for place in places) else logging.INFO
        for route in routes:
            if route.reason and route.reason not in self._said:
                self._said.add(route.reason)
                engines = ", ".join(dict.fromkeys(names[number] for number in route.receivers))
                way = "gloo" if route.kind == "gloo" else "shared memory"
                text = "weight sync %s: weights reach engine %s through main memory (%s): %s"
                log.log(level, text, self.name, engines, way, route.reason)

    async def release(self) -> None:
        trainer, members, meeting = self._trainer, self._members, self._meeting
        self._trainer, self._members, self._meeting = None, [], None
        if trainer is None:
            return
        if meeting is not None:
            from rlhf_host.distributed.sync.rendezvous import stop_waiting

            await asyncio.to_thread(stop_waiting, *meeting)
        ends = (trainer, *(target.engine for target in members))
        leaving = [asyncio.ensure_future(end.run(f"{RENDEZVOUS}:leave")) for end in ends]
        await asyncio.wait(leaving, timeout=LEAVE_S)
        for task in leaving:
            if not task.done():
                task.cancel()
            elif not task.cancelled():
                task.exception()  # nothing to be done about it
