"""Sampling ahead of training on up to 512 GPUs: the host's own admission and dispatching, simulated engines and trainer.

python benchmarks/pipeline_sim.py                 # 8 to 512 GPUs, 1,000 to 100,000 open episodes, depths 0 to 8
python benchmarks/pipeline_sim.py --case table    # 32 groups × 8, rollout and training take equally long
python benchmarks/pipeline_sim.py --case refill   # half of 64 groups are dropped: replaced at once, in rounds, or drawn in advance

A heap of events: no model, and nothing sleeps. Every run asserts that each draw is trained, dropped or open, exactly once, in the
order of the draws unless some may be passed, and that no batch is older than allowed.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import itertools
import json
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rlhf_host.distributed.ray.dispatch import Dispatcher, Lane, Ticket
from rlhf_host.distributed.ray.engine_pool import AHEAD
from rlhf_host.rollouts.admission import Admission, InAdvance
from rlhf_host.rollouts.overtaking import Overtaking

T = TypeVar("T")
Row = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """What is simulated. The default engine is four H100 with a model of about 32 billion parameters."""

    batch: int
    """Groups of a step."""
    depth: int
    engines: int
    steps: int
    n: int = 8
    slots: int = 256
    """Sequences that an engine decodes together."""
    floor_s: float = 0.012
    """Of a decoding step, however few sequences there are."""
    sequence_s: float = 0.00005
    """Each of them takes so much longer."""
    prefill_rate: float = 40_000.0
    """Tokens per second of an engine; meanwhile it decodes nothing."""
    mean: float = 2000.0
    """Sampled tokens of an episode: lognormal."""
    shape: float = 1.0
    """Standard deviation of the logarithm, also of the environment's time."""
    longest: float = 8.0
    """Times the mean."""
    turns: int = 2
    prompt: int = 500
    observation: int = 200
    """Tokens before every turn but the first."""
    environment_s: float = 2.0
    train_s: float = 0.0
    sync_s: float = 0.0
    in_flight: bool = True
    """Whether weights change under requests. Otherwise those under way are answered first, and new ones wait."""
    recompute: bool = True
    """Whether contexts are computed again after a sync."""
    dropped: float = 0.0
    """Share of the groups."""
    refills: int = 8
    lost_every_s: float = math.inf
    """Mean time until an engine is lost."""
    lost_for_s: float = 60.0
    seed: int = 0
    max_staleness: int = 0
    """If it is more than the depth, draws may be passed by later ones."""
    rounds: bool = False
    """Whether what is dropped is replaced when all that was begun is over, as ``Collector.fill`` does."""

    @property
    def mean_tokens(self) -> float:
        """Of an episode, with the longest cut off."""
        cap, location = math.log(self.longest * self.mean), math.log(self.mean) - self.shape**2 / 2
        below = statistics.NormalDist(location + self.shape**2, self.shape).cdf(cap)
        above = 1 - statistics.NormalDist(location, self.shape).cdf(cap)
        return self.mean * below + self.longest * self.mean * above

    def tokens_per_s(self, sequences: float) -> float:
        """Of an engine that decodes so many."""
        return sequences / (self.floor_s + self.sequence_s * sequences)

    def admission(self) -> Admission:
        size = self.batch, self.depth, self.steps, self.batch * (1 + self.refills)
        if self.max_staleness > self.depth:
            return Overtaking(*size, max_staleness=self.max_staleness)
        return Admission(*size) if self.depth or self.rounds else InAdvance(*size)

    @property
    def capacity(self) -> float:
        """Tokens per second of all engines, when all open episodes or all slots are decoding."""
        open_episodes = (self.depth + 1) * self.batch * self.n
        return self.engines * self.tokens_per_s(min(self.slots, open_episodes / self.engines))

    @property
    def rollout_s(self) -> float:
        """Of a batch and what is dropped of it, by throughput alone."""
        groups = self.batch / (1 - self.dropped)
        prefill = groups * (self.prompt + self.n * self.observation * (self.turns - 1))
        return groups * self.n * self.mean_tokens / self.capacity + prefill / self.prefill_rate / self.engines


@dataclass(eq=False, slots=True)
class Group:
    ordinal: int
    version: int
    """Under which it was admitted."""
    kept: bool
    tokens: int
    left: int
    """Episodes that are not over."""
    version_tokens: int = 0
    """Sum over its tokens of the version that began their turn."""
    cached: Any = None
    """The engine, its life and its weights that have computed the prompt."""
    tickets: dict[int, Ticket] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Episode:
    group: Group
    tokens: list[int]
    """Of each turn."""
    waits: list[float]
    """Of the environment, after every turn but the last."""
    turn: int = 0
    context: int = 0
    """Tokens after the prompt, without this turn."""
    version: int = 0
    """Of the weights that began this turn."""
    cached: Any = None

    def news(self, setup: Setup) -> int:
        """What the environment said before this turn."""
        return setup.observation * bool(self.turn)


@dataclass(frozen=True, slots=True)
class Trained:
    """A group in a batch."""

    ordinal: int
    version: int
    age: int
    """Versions since its admission."""
    token_age: float
    """Versions since a turn was begun, the mean over its tokens."""
    tokens: int


class Engine:
    """Decodes up to ``slots`` sequences, all equally fast. ``position`` is how many tokens a sequence has that was always there."""

    def __init__(self, lane: Lane, setup: Setup):
        self.lane, self.setup = lane, setup
        self.life = self.stamp = 0
        self.position = self.since = self.decoded = 0.0
        self.busy_until = 0.0
        """Prefill and weights: before it nothing is decoded."""
        self.queue: deque[Ticket] = deque()
        self.active: list[tuple[float, int, Ticket]] = []

    @property
    def speed(self) -> float:
        return self.setup.tokens_per_s(len(self.active)) / len(self.active) if self.active else 0.0

    def advance(self, now: float) -> None:
        moved = max(0.0, now - max(self.since, self.busy_until)) * self.speed
        self.position += moved
        self.decoded += moved * len(self.active)
        self.since = now

    def occupy(self, now: float, seconds: float) -> None:
        self.busy_until = max(self.busy_until, now) + seconds

    def fill(self, now: float, version: int) -> None:
        """Begin what there are slots for; call ``advance`` before."""
        setup, weights = self.setup, version if self.setup.recompute else 0
        key, tokens = (self.lane, self.life, weights), 0
        while self.queue and len(self.active) < setup.slots:
            ticket = self.queue.popleft()
            episode: Episode = ticket.content
            group = episode.group
            tokens += setup.prompt * (group.cached != key) + episode.context * (episode.cached != key) + episode.news(setup)
            episode.cached = group.cached = key
            episode.version = version
            heapq.heappush(self.active, (self.position + episode.tokens[episode.turn], ticket.number, ticket))
        if tokens:
            self.occupy(now, tokens / setup.prefill_rate)

    def next_end(self, now: float) -> float:
        return max(self.busy_until, now) + max(0.0, self.active[0][0] - self.position) / self.speed

    def ended(self) -> list[Ticket]:
        tickets = []
        while self.active and self.active[0][0] <= self.position + 1e-6:
            tickets.append(heapq.heappop(self.active)[2])
        return tickets

    def forget(self, numbers: Iterable[int] | None = None) -> None:
        """Stop these; without an argument: all, with what is cached."""
        if numbers is None:
            self.life += 1
            self.active, self.queue = [], deque()
            return
        gone = {*numbers}
        self.active = [one for one in self.active if one[1] not in gone]
        heapq.heapify(self.active)
        self.queue = deque(ticket for ticket in self.queue if ticket.number not in gone)


@dataclass
class Stopwatch:
    """Seconds within the calls that it makes."""

    seconds: float = 0.0
    longest: float = 0.0

    def __call__(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        started = time.perf_counter()
        result = function(*arguments, **named)
        took = time.perf_counter() - started
        self.seconds += took
        self.longest = max(self.longest, took)
        return result


class Simulation:
    """One run. ``ordinals`` maps draws to the draws of another run, to have its groups again."""

    def __init__(self, setup: Setup, admission: Admission | None = None, ordinals: Sequence[int] | None = None):
        self.setup, self.ordinals = setup, ordinals
        self.admission = admission or setup.admission()
        self.dispatcher = Dispatcher(setup.engines)
        self.engines = [Engine(lane, setup) for lane in self.dispatcher.lanes]
        for lane in self.dispatcher.lanes:
            lane.open, lane.capacity = True, AHEAD * setup.slots
        self.dice = random.Random(setup.seed)
        self.clock, self.events, self.deals = Stopwatch(), 0, 0
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._open: dict[int, Group] = {}
        self._playing = 0
        self._gated: list[Ticket] | None = None
        """Requests that wait for new weights; ``None``: the gate is open."""
        self._requests = 0
        """Under way."""
        self._held_since = 0.0
        self._since: float | None = 0.0
        """Since when the trainer waits for a batch."""
        self.fate: dict[int, bool] = {}
        """Draws of taken batches: whether they were trained."""
        self.trained: list[Trained] = []
        self.drawn: list[tuple[int, bool]] = []
        """Of each draw its tokens, and whether filters keep it."""
        self.returned_tokens = 0.0
        self.marks: list[dict[str, float]] = []
        """At each version."""
        self.waited = self.held = 0.0

    def run(self) -> dict[str, float]:
        started, computed = time.perf_counter(), time.process_time()
        for engine in self.engines:
            self._fail_later(engine)
        self._mark()
        self._admit()
        self._deal()
        while self.admission.version < self.setup.steps:
            assert self._heap, "nothing runs and nothing trains: a deadlock"
            self.now, _, handle, arguments = heapq.heappop(self._heap)
            handle(*arguments)
            self._train()
            if self.dispatcher.arrived:
                self._deal()
        self._check()
        return self._figures(time.perf_counter() - started, time.process_time() - computed)

    def _at(self, delay: float, handle: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (self.now + delay, next(self._numbers), handle, arguments))

    # What the pipeline does

    def _admit(self) -> None:
        if self.setup.rounds and self._playing:
            return
        while self.clock(getattr, self.admission, "has_capacity"):
            self._begin(self.clock(self.admission.admit))

    def _begin(self, ordinal: int) -> None:
        setup = self.setup
        own = random.Random(1_000_003 * setup.seed + (ordinal if self.ordinals is None else self.ordinals[ordinal]))
        location = math.log(setup.mean) - setup.shape**2 / 2
        episodes = []
        for _ in range(setup.n):
            length = max(setup.turns, int(min(setup.longest * setup.mean, own.lognormvariate(location, setup.shape))))
            tokens = [length // setup.turns + (turn < length % setup.turns) for turn in range(setup.turns)]
            location_s = math.log(setup.environment_s) - setup.shape**2 / 2
            waits = [own.lognormvariate(location_s, setup.shape) for _ in range(setup.turns - 1)]
            episodes.append((tokens, waits))
        tokens_of_all = sum(sum(tokens) for tokens, _ in episodes)
        kept = own.random() >= setup.dropped
        group = self._open[ordinal] = Group(ordinal, self.admission.version, kept, tokens_of_all, setup.n)
        self._playing += 1
        if ordinal == len(self.drawn):  # not given back before
            self.drawn.append((tokens_of_all, kept))
        for tokens, waits in episodes:
            self._ask(Episode(group, tokens, waits))

    def _ask(self, episode: Episode) -> None:
        most = int(self.setup.longest * self.setup.mean) // self.setup.turns
        context = self.setup.prompt + episode.context + episode.news(self.setup)
        ticket = Ticket(next(self._numbers), episode.group.ordinal, context + most, episode)
        episode.group.tickets[ticket.number] = ticket
        if self._gated is None:
            self._requests += 1
            self.dispatcher.arrived.append(ticket)
        else:
            self._gated.append(ticket)

    def _answered(self, episode: Episode) -> None:
        tokens = episode.tokens[episode.turn]
        episode.group.version_tokens += episode.version * tokens
        episode.context += episode.news(self.setup) + tokens
        episode.turn += 1
        if episode.turn < len(episode.tokens):
            self._at(episode.waits[episode.turn - 1], self._observed, episode)
            return
        group = episode.group
        group.left -= 1
        if not group.left:
            self._over(group)

    def _observed(self, episode: Episode) -> None:
        if episode.group.ordinal in self._open and self._open[episode.group.ordinal] is episode.group:
            self.events += 1
            self._ask(episode)

    def _over(self, group: Group) -> None:
        self._playing -= 1
        if self.setup.rounds and self._playing:
            return
        if not self.setup.rounds:
            self.clock(self.admission.verdict, group.ordinal, kept=group.kept)
            self._admit()
        self.clock(self.admission.over, group.ordinal)
        settled = self.admission.unsettled
        while (first := self._open.get(self.admission.unsettled)) is not None and not first.left:
            self.clock(self.admission.settle, kept=first.kept)
            if surplus := self.clock(self.admission.surplus):
                self._return(surplus)
        if self.admission.unsettled != settled:
            self._admit()

    def _return(self, ordinals: range) -> None:
        """They go back to the stream; what was sampled of them is lost."""
        gone: dict[Lane, list[int]] = {}
        for ordinal in ordinals:
            group = self._open.pop(ordinal)
            self._playing -= bool(group.left)
            self.returned_tokens += group.tokens * (not group.left)
            for number, ticket in group.tickets.items():
                if (lane := self.clock(self.dispatcher.drop, ticket)) is not None:
                    gone.setdefault(lane, []).append(number)
            self._requests -= len(group.tickets)
        for engine in self.engines:
            if numbers := gone.get(engine.lane):
                engine.advance(self.now)
                self.returned_tokens += sum(
                    ticket.content.tokens[ticket.content.turn] - (end - engine.position)
                    for end, number, ticket in engine.active
                    if number in numbers
                )
                engine.forget(numbers)
                for number in numbers:
                    self.clock(self.dispatcher.answered, engine.lane, number)
                self._continue(engine)

    # Trainer and weights

    def _train(self) -> None:
        """Begin with a batch, if there is one."""
        if self._since is None or (taken := self.clock(self.admission.take)) is None:
            return
        self.waited += self.now - self._since
        self._since = None
        version, kept = self.admission.version, 0
        in_order = isinstance(self.admission, Overtaking) or [*taken] == [*range(len(self.fate), len(self.fate) + len(taken))]
        assert in_order, "batches follow each other in the order of the draws"
        for ordinal in taken:
            group = self._open.pop(ordinal)
            assert ordinal not in self.fate, f"draw {ordinal} was used twice"
            assert not group.left, f"draw {ordinal} is not over"
            self.fate[ordinal] = group.kept
            if group.kept:
                age = version - group.version
                assert 0 <= age <= self.admission.max_age, f"draw {ordinal} is {age} versions old"
                self.trained.append(Trained(ordinal, version, age, version - group.version_tokens / group.tokens, group.tokens))
                kept += 1
        assert kept == self.setup.batch or len(taken) == self.admission.budget, "a batch is full unless its budget is used up"
        self._at(self.setup.train_s, self._trained)

    def _trained(self) -> None:
        self.events += 1
        if self.setup.in_flight:
            self._sync()
            return
        self._gated, self._held_since = [], self.now
        if not self._requests:
            self._sync()

    def _sync(self) -> None:
        setup = self.setup
        if not setup.in_flight:
            self.held += self.now - self._held_since
        for engine in self.engines:
            engine.advance(self.now)
            engine.occupy(self.now, setup.sync_s)
            if setup.in_flight and setup.recompute:
                key = (engine.lane, engine.life, self.admission.version + 1)
                context = 0.0
                for end, _, ticket in engine.active:
                    episode = ticket.content
                    context += setup.prompt * (episode.group.cached != key) + episode.context + episode.news(setup)
                    context += episode.tokens[episode.turn] - (end - engine.position)
                    episode.cached = episode.group.cached = key
                engine.occupy(self.now, context / setup.prefill_rate)
            self._continue(engine)
        self._at(setup.sync_s, self._published)

    def _published(self) -> None:
        self.events += 1
        self.clock(self.admission.publish, self.admission.version + 1)
        self._mark()
        if self._gated is not None:
            self.dispatcher.arrived += (waiting := [ticket for ticket in self._gated if not ticket.dropped])
            self._requests += len(waiting)
            self._gated = None
        self._admit()
        self._since = self.now

    # Engines

    def _deal(self) -> None:
        self.deals += 1
        for engine, tickets in zip(self.engines, self.clock(self.dispatcher.deal), strict=True):
            if tickets:
                engine.queue.extend(tickets)
                engine.advance(self.now)
                self._continue(engine)

    def _continue(self, engine: Engine) -> None:
        """Call ``advance`` before."""
        engine.fill(self.now, self.admission.version)
        engine.stamp += 1
        if engine.active:
            self._at(engine.next_end(self.now) - self.now, self._decoded, engine, engine.stamp)

    def _decoded(self, engine: Engine, stamp: int) -> None:
        if stamp != engine.stamp:
            return
        engine.advance(self.now)
        for ticket in engine.ended():
            if self.clock(self.dispatcher.answered, engine.lane, ticket.number) is not None:
                self.events += 1
                self._requests -= 1
                del ticket.content.group.tickets[ticket.number]
                self._answered(ticket.content)
        self._continue(engine)
        if self.clock(getattr, self.dispatcher, "waits"):
            self._deal()
        if self._gated is not None and not self._requests:
            self._sync()

    def _fail_later(self, engine: Engine) -> None:
        if math.isfinite(self.setup.lost_every_s):
            self._at(self.dice.expovariate(1 / self.setup.lost_every_s), self._lost, engine)

    def _lost(self, engine: Engine) -> None:
        self.events += 1
        engine.advance(self.now)
        engine.forget()
        engine.stamp += 1
        self.clock(self.dispatcher.close, engine.lane)
        self._at(self.setup.lost_for_s, self._back, engine)

    def _back(self, engine: Engine) -> None:
        self.events += 1
        engine.advance(self.now)
        engine.lane.open = True
        self._deal()
        self._fail_later(engine)

    # What is asserted and reported

    def _mark(self) -> None:
        for engine in self.engines:
            engine.advance(self.now)
        decoded = sum(engine.decoded for engine in self.engines)
        self.marks.append({"s": self.now, "decoded": decoded, "waited": self.waited, "held": self.held})

    def _check(self) -> None:
        """The ledger."""
        admitted = self.admission.admitted
        assert sorted([*self.fate, *self._open]) == [*range(admitted)], "each draw is trained, dropped or open, once"
        assert not self._open or min(self._open) == self.admission.taken
        assert not self.admission.passed or min(self.admission.passed) > self.admission.taken

    def _figures(self, took_s: float, cpu_s: float) -> dict[str, float]:
        setup = self.setup
        filled = max(setup.depth, setup.max_staleness)
        first, last = self.marks[filled], self.marks[setup.steps - filled]
        steps = setup.steps - 2 * filled
        of_step = {name: (last[name] - first[name]) / steps for name in first}
        wall, training = of_step["s"], setup.train_s + setup.sync_s
        counted = [one for one in self.trained if one.version >= filled]
        wanted = statistics.fmean(tokens for tokens, kept in self.drawn if kept)
        ages, tokens = [one.token_age for one in counted], [one.tokens for one in counted]
        return {
            "wall_s": wall,
            "rollout_s": setup.rollout_s,
            "training_s": training,
            "over_max": wall / max(setup.rollout_s, training),
            "engines": of_step["decoded"] / wall / setup.capacity,
            "trainer": setup.train_s / wall,
            "trainer_waits_s": of_step["waited"],
            "held_s": of_step["held"],
            "staleness_mean": sum(age * count for age, count in zip(ages, tokens, strict=True)) / sum(tokens),
            "staleness_max": max(one.age for one in self.trained),
            "staleness_length": statistics.correlation(ages, tokens) if len({*ages}) > 1 else 0.0,
            "trained_over_drawn": statistics.fmean(one.tokens for one in self.trained) / wanted,
            "dropped": sum(not kept for kept in self.fate.values()),
            "returned_share": self.returned_tokens / self.marks[-1]["decoded"],
            "events": self.events,
            "deals": self.deals / self.events,
            "controller_us": self.clock.seconds / self.events * 1e6,
            "controller_peak_ms": self.clock.longest * 1e3,
            "cpu_share": cpu_s / took_s,
            "simulation_us": took_s / self.events * 1e6,
            "took_s": took_s,
        }


def cell(gpus: int, open_episodes: int, depth: int, *, in_flight: bool, most: int = 0, slots: int = Setup.slots) -> Setup:
    """Three quarters of the GPUs sample, in engines of four (two where there are eight). The rest trains as fast as these sample by
    throughput, so neither side has anything to spare."""
    wide = 4 if gpus > 8 else 2
    setup = Setup(
        batch=round(open_episodes / (depth + 1) / Setup.n),
        depth=depth,
        engines=gpus * 3 // 4 // wide,
        slots=slots,
        max_staleness=most,
        steps=2 * max(depth, most) + max(depth + 1, most + 1, 2 if open_episodes > 10_000 else 4),
        sync_s=2.0,
        in_flight=in_flight,
        dropped=0.2,
        lost_every_s=3600.0,
    )
    if wide == 2:
        setup = replace(setup, floor_s=2 * setup.floor_s, sequence_s=2 * setup.sequence_s, prefill_rate=setup.prefill_rate / 2)
    return replace(setup, train_s=max(0.0, setup.rollout_s - setup.sync_s))


def grid() -> list[Row]:
    """A fifth of the groups is dropped, every engine is lost once an hour, and a sync takes 2 s and all caches."""
    names = [
        "gpus",
        "slots",
        "open",
        "depth",
        "most",
        "in_flight",
        "over_max",
        "engines",
        "trainer",
        "trainer_waits_s",
        "held_s",
        "staleness_mean",
    ]
    names += ["staleness_max", "staleness_length", "trained_over_drawn", "deals", "controller_us", "simulation_us", "cpu_share"]
    rows = Rows(names)
    sizes = [(gpus, count, Setup.slots) for gpus in (8, 64, 512) for count in (1_000, 10_000)]
    depths = ((0, 0), (1, 1), (2, 2), (4, 4), (8, 8), (1, 4))
    cells = [(*size, *depth, in_flight) for size in sizes for depth in depths for in_flight in (False, True)]
    # As many episodes per slot as below, so that the controller's time can be compared.
    cells += [(512, 1_000, 3, 1, 1, True), (512, 10_000, 26, 1, 1, True)]
    cells += [(512, 100_000, 256, *depth, True) for depth in depths]
    for gpus, count, slots, depth, most, in_flight in cells:
        if depth or in_flight:  # with depth 0 nothing is under way
            figures = Simulation(cell(gpus, count, depth, in_flight=in_flight, most=most, slots=slots)).run()
            rows.add(
                {"gpus": gpus, "open": count, "slots": slots, "depth": depth, "most": most, "in_flight": in_flight} | figures
            )
    return rows.rows


def table(steps: int = 200) -> list[Row]:
    """32 groups × 8 of one turn. Rollout alone takes 1 s by throughput, and so does training, with 0.05 s for a sync."""
    equal = Setup(
        batch=32,
        depth=0,
        engines=1,
        steps=steps,
        sequence_s=0.0,
        prefill_rate=math.inf,
        turns=1,
        train_s=1.0,
        sync_s=0.05,
    )
    equal = replace(equal, floor_s=1 / equal.mean_tokens)
    halves = replace(equal, floor_s=equal.floor_s / 2, sequence_s=equal.floor_s / 2 / equal.slots)
    names = ["engine", "in_flight", "depth", "most", "over_max", "engines", "trainer", "trainer_waits_s", "held_s"]
    rows = Rows([*names, "staleness_mean", "staleness_max", "staleness_length", "trained_over_drawn"])
    depths = ((0, 0), (1, 1), (2, 2), (4, 4), (8, 8), (1, 2), (1, 4), (1, 8), (2, 4))
    for (engine, setup), in_flight, (depth, most) in itertools.product(
        (("one speed", equal), ("twice as fast alone", halves)), (False, True), depths
    ):
        if depth or in_flight:
            asked = replace(setup, depth=depth, max_staleness=most, steps=steps + 2 * most, in_flight=in_flight)
            rows.add({"engine": engine, "in_flight": in_flight, "depth": depth, "most": most} | Simulation(asked).run())
    return rows.rows


def refill(steps: int = 60) -> list[Row]:
    """64 groups × 8 of one turn, of which half are dropped. Training takes no time. Engines have slots for a whole batch, or for a
    quarter of it."""
    names = [
        "engines_of_64",
        "rule",
        "over_bound",
        "nothing_dropped_s",
        "throughput_s",
        "wall_s",
        "returned_share",
        "same_batches",
    ]
    rows = Rows(names)
    for engines in (8, 2):
        setup = Setup(batch=64, depth=0, engines=engines, steps=steps, slots=64, turns=1, dropped=0.5)
        budget = setup.batch * (1 + setup.refills)
        streaming = Simulation(setup, Admission(setup.batch, 0, steps, budget))
        streaming.run()
        kept = [one.ordinal for one in streaming.trained]
        drawn = sum(tokens for tokens, _ in streaming.drawn[: len(streaming.fate)]) / steps
        bounds = {
            "nothing_dropped_s": Simulation(replace(setup, dropped=0.0), ordinals=kept).run()["wall_s"],
            "throughput_s": drawn / engines / setup.tokens_per_s(setup.slots),
        }
        rules: list[tuple[str, Setup, Admission | None]] = [
            ("in rounds", replace(setup, rounds=True), None),
            ("at once", setup, Admission(setup.batch, 0, steps, budget)),
            ("in advance", setup, None),
        ]
        for in_flight, depth in itertools.product((False, True), (1, 2)):
            name = f"at once, depth {depth}" + ", held" * (not in_flight)
            rules.append((name, replace(setup, depth=depth, steps=steps + 2 * depth, in_flight=in_flight), None))
        for name, asked, admission in rules:
            simulation = Simulation(asked, admission)
            figures: Row = simulation.run() | bounds
            figures["over_bound"] = figures["wall_s"] / max(bounds.values())
            same = [one.ordinal for one in simulation.trained][: len(kept)] == kept
            rows.add({"engines_of_64": engines, "rule": name, "same_batches": same} | figures)
    return rows.rows


class Rows:
    """Printed one after another."""

    def __init__(self, names: Sequence[str]):
        self.names, self.rows = names, list[Row]()
        print("  ".join(names), flush=True)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        cells = [f"{row[name]:.2f}" if isinstance(row[name], float) else str(row[name]) for name in self.names]
        print("  ".join(text.rjust(len(name)) for text, name in zip(cells, self.names, strict=True)), flush=True)
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("grid", "table", "refill"), default="grid")
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    asked = parser.parse_args()
    gc.disable()  # a collection would count the simulation's objects as the controller's time
    rows = {"grid": grid, "table": table, "refill": refill}[asked.case]()
    if asked.json:
        print(json.dumps({"case": asked.case, "rows": rows}))


if __name__ == "__main__":
    main()
