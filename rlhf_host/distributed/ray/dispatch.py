"""Distribution of requests: groups stay where their prompt is cached, and engines are kept evenly busy. No Ray, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

HOMES = 100_000
"""Number of groups whose engine is remembered."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One request on its way."""

    number: int
    group: Hashable
    """Requests of one group share their prompt."""
    tokens: int
    """Tokens of the prompt, plus the most that may be sampled."""
    content: Any = None
    dropped: bool = False
    """True if nobody waits for it any more."""


@dataclass(eq=False, slots=True)
class Lane:
    """One engine's requests."""

    capacity: int | None = None
    """Maximum number of requests at a time; None: no limit."""
    open: bool = False
    tokens: int = 0
    """Tokens of requests that were sent to this engine or wait for it."""
    sent: dict[int, Ticket] = field(default_factory=dict)
    waiting: deque[Ticket] = field(default_factory=deque)

    @property
    def free(self) -> float:
        return float("inf") if self.capacity is None else self.capacity - len(self.sent) - len(self.waiting)


class Dispatcher:
    """Distributes requests over lanes, each request to one lane at a time. The work per request does not depend on their
    number.
    """

    def __init__(self, lanes: int):
        self.lanes = [Lane() for _ in range(lanes)]
        self.arrived: list[Ticket] = []
        self._free: deque[tuple[Hashable, list[Ticket]]] = deque()
        self._homes: dict[Hashable, Lane] = {}

    @property
    def waits(self) -> bool:
        """True if there is anything to distribute."""
        return bool(self.arrived or self._free or any(lane.waiting for lane in self.lanes))

    @property
    def in_flight(self) -> int:
        return sum(len(lane.sent) for lane in self.lanes)

    def deal(self) -> list[list[Ticket]]:
        """Returns the requests to send to each lane now; they count as sent."""
        self._place()
        batches: list[list[Ticket]] = [[] for _ in self.lanes]
        while True:
            self._assign()
            taken = [self._take(lane) if lane.open else [] for lane in self.lanes]
            if not any(taken):
                return batches
            for batch, more in zip(batches, taken, strict=True):
                batch += more

    def _place(self) -> None:
        groups: dict[Hashable, list[Ticket]] = {}
        for ticket in self.arrived:
            if ticket.dropped:
                continue
            home = self._homes.get(ticket.group)
            if home is not None and home.open:
                home.waiting.append(ticket)
                home.tokens += ticket.tokens
            else:
                groups.setdefault(ticket.group, []).append(ticket)
        self.arrived = []
        # The heaviest first: what is left to even out the lanes is light then.
        self._free.extend(sorted(groups.items(), key=lambda item: -sum(ticket.tokens for ticket in item[1])))

    def _assign(self) -> None:
        """Assigns groups without a lane to the one with the fewest tokens, as long as any has free."""
        while self._free:
            able = [lane for lane in self.lanes if lane.open and lane.free > 0]
            if not able:
                return
            lane = min(able, key=lambda lane: lane.tokens)
            group, tickets = self._free.popleft()
            tickets = [ticket for ticket in tickets if not ticket.dropped]
            if not tickets:
                continue
            self._homes.pop(group, None)
            self._homes[group] = lane
            if len(self._homes) > HOMES:
                del self._homes[next(iter(self._homes))]
            lane.waiting.extend(tickets)
            lane.tokens += sum(ticket.tokens for ticket in tickets)

    def _take(self, lane: Lane) -> list[Ticket]:
        batch: list[Ticket] = []
        while lane.waiting and (lane.capacity is None or len(lane.sent) < lane.capacity):
            ticket = lane.waiting.popleft()
            if ticket.dropped:
                lane.tokens -= ticket.tokens
                continue
            lane.sent[ticket.number] = ticket
            batch.append(ticket)
        return batch

    def answered(self, lane: Lane, number: int) -> Ticket | None:
        """Removes a finished request and returns it; None if it was no longer this lane's."""
        ticket = lane.sent.pop(number, None)
        if ticket is not None:
            lane.tokens -= ticket.tokens
        return ticket

    def drop(self, ticket: Ticket) -> Lane | None:
        """Drops a request that nobody waits for: it will not be sent. Returns its lane if it was sent already."""
        ticket.dropped = True
        return next((lane for lane in self.lanes if ticket.number in lane.sent), None)

    def close(self, lane: Lane) -> int:
        """Removes a lane whose engine is lost. Its requests are distributed again, before later ones. Returns their number."""
        lane.open = False
        groups: dict[Hashable, list[Ticket]] = {}
        tickets = self._empty(lane)
        for ticket in tickets:
            groups.setdefault(ticket.group, []).append(ticket)
        self._free.extendleft(reversed(groups.items()))
        return len(tickets)

    def drain(self) -> list[Ticket]:
        """Removes and returns every request that is not answered."""
        waiting = [ticket for _, tickets in self._free for ticket in tickets] + self.arrived
        for lane in self.lanes:
            waiting += self._empty(lane)
        self._free, self.arrived = deque(), []
        return [ticket for ticket in waiting if not ticket.dropped]

    def _empty(self, lane: Lane) -> Sequence[Ticket]:
        tickets: Iterable[Ticket] = [*lane.sent.values(), *lane.waiting]
        lane.sent, lane.waiting, lane.tokens = {}, deque(), 0
        return [ticket for ticket in tickets if not ticket.dropped]
