"""Spans of several processes on one clock, as a file that Perfetto reads."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from rlhf_profile.clocks import Reading, offset
from rlhf_profile.joining import Answer, joined
from rlhf_profile.operations import Event, self_times, together
from rlhf_profile.timeline import Process, Work, covered, gaps, lanes, shares

from .trace_rules import refuse_broken


def made_up(dice, count, threads=3):
    """Work whose spans overlap in every way."""
    names = ("request", "generate", "score", "pass actor", "outputs reference", "sync", "something else")
    found = []
    for _ in range(count):
        began = dice.randrange(0, 50_000_000)
        number = dice.randrange(threads)
        found.append(Work(number, f"thread {number}", dice.choice(names), began, began + dice.randrange(1, 20_000_000)))
    return found


def test_spans_that_overlap_get_lanes_in_which_they_nest():
    dice = random.Random(0)
    for _ in range(50):
        work = made_up(dice, 40, threads=1)
        found = lanes(work)
        assert sorted(own for lane in found for own in lane) == sorted(work)
        for lane in found:
            for first in lane:
                for second in lane:
                    apart = first.ended <= second.began or second.ended <= first.began
                    inside = first.began <= second.began and second.ended <= first.ended
                    inside = inside or (second.began <= first.began and first.ended <= second.ended)
                    assert apart or inside


def test_unions_and_gaps_are_those_of_single_moments():
    dice = random.Random(1)
    for _ in range(100):
        spans = [
            (begun, begun + dice.randrange(1, 30)) for begun in (dice.randrange(0, 90) for _ in range(dice.randrange(1, 8)))
        ]
        busy = {moment for begun, ended in spans for moment in range(begun, ended)}
        assert covered(spans) == len(busy)
        free = gaps(spans, 10, 100)
        assert {moment for begun, ended in free for moment in range(begun, ended)} == set(range(10, 100)) - busy
        assert all(first[1] < second[0] for first, second in pairwise(free))


def test_a_timeline_of_several_processes_keeps_the_rules_of_the_format():
    dice = random.Random(2)
    step = Work(0, "MainThread", "step", 1_000_000, 60_000_000)
    inside = [
        Work(0, "MainThread", "rollout", 1_000_000, 30_000_000),
        Work(0, "MainThread", "train", 30_500_000, 50_000_000),
        Work(0, "MainThread", "sync", 50_000_000, 59_000_000),
    ]
    answers = [
        answer("controller", (0, 0), [step, *inside, *made_up(dice, 60)]),
        answer("trainer rank 0", (0, 0), made_up(dice, 60)),
        answer(
            "engine 0",
            (7_000_000_000, 500),
            [own._replace(began=own.began + 7 * 10**9, ended=own.ended + 7 * 10**9) for own in made_up(dice, 60)],
        ),
    ]
    timeline, record, notes = joined(5, answers, 0.06)
    threads = refuse_broken(timeline)
    assert {pid for pid, _ in threads} == {1, 2, 3}
    assert timeline["otherData"]["clocks"]["engine 0"] == {"offset_us": 7e6, "uncertainty_us": 0.5}
    assert max(end for events in threads.values() for _, end, _ in events) <= 10 * 70_000, (
        "the other clock is taken into account"
    )
    assert [phase["name"] for phase in record["phases"]] == ["rollout", "train", "sync"]
    assert record["covered"] == pytest.approx((29 + 19.5 + 9) / 59)
    assert notes == ["controller, trainer rank 0, engine 0: a remark"]


def answer(name, clock, work):
    result = {
        "began": 0,
        "ended": 70_000_000,
        "spans": [tuple(own) for own in work],
        "files": [],
        "operations": [],
        "notes": ["a remark"],
    }
    return Answer(name, {"host": "here", "pid": 1}, clock, result)


def test_a_process_waits_while_its_computing_thread_has_no_work():
    work = [
        Work(1, "compute", "pass actor", 10, 40),
        Work(1, "compute", "forward", 10, 20),
        Work(1, "compute", "optimizer actor", 50, 60),
        Work(2, "other", "call x.y:send", 0, 100),
    ]
    (own,) = shares([Process("rank", "here", 1, work)], 0, 100)
    assert own.seconds == {"trains": 40e-9, "syncs": 100e-9, "waits": 60e-9}


def test_pieces_of_sampling_that_are_near_are_one():
    spans = [(1, "vllm", "generate", begun, begun + 5_000_000, False) for begun in (0, 5_000_500, 10_001_000, 40_000_000)]
    merged = Answer("engine", {"host": "h", "pid": 1}, (0, 0), {"spans": spans}).process.work
    assert [(own.began, own.ended) for own in merged] == [(0, 15_001_000), (40_000_000, 45_000_000)]


def test_a_clock_is_read_from_the_quickest_answer():
    ahead, dice = 123_456_789_000, random.Random(3)
    readings = []
    for asked in range(0, 10**9, 10**8):
        there, back = dice.randrange(10**5, 10**7), dice.randrange(10**5, 10**7)
        readings.append(Reading(asked, asked + there + ahead, asked + there + back))
    found, uncertainty = offset(readings)
    assert uncertainty == min((each.answered - each.asked + 1) // 2 for each in readings)
    assert abs(found - ahead) <= uncertainty


def test_the_own_time_of_operations_is_that_of_single_moments():
    dice = random.Random(4)
    for _ in range(50):
        events = [event for place in range(2) for event in nested(dice, (place, 0), 0, 1000, 4)]
        expected: dict[str, int] = {}
        for place in ((0, 0), (1, 0)):
            for moment in range(1000):
                over = [event for event in events if event.place == place and event.began <= moment < event.ended]
                if over:
                    innermost = min(over, key=lambda event: (event.ended - event.began, event.name))
                    expected[innermost.name] = expected.get(innermost.name, 0) + 1
        assert {name: time for name, (time, _) in self_times(events).items() if time} == expected


def nested(dice, place, began, ended, depth):
    """Events that nest, each at least one moment longer than what is inside."""
    while depth and ended - began > 4:
        first = dice.randrange(began, ended - 3)
        last = dice.randrange(first + 2, ended)
        yield Event(place, first, last, f"depth {depth}")
        yield from nested(dice, place, first, last - 1, depth - 1)
        began = last


def test_operations_of_several_processes_add_up():
    first = [
        {"name": "mm", "device": "cpu", "seconds": 1.0, "calls": 2},
        {"name": "add", "device": "cpu", "seconds": 0.5, "calls": 1},
    ]
    second = [
        {"name": "add", "device": "cpu", "seconds": 2.0, "calls": 3},
        {"name": "mm", "device": "cuda", "seconds": 0.1, "calls": 1},
    ]
    assert [(row["name"], row["device"], row["seconds"], row["calls"]) for row in together([first, second])] == [
        ("add", "cpu", 2.5, 4),
        ("mm", "cpu", 1.0, 2),
        ("mm", "cuda", 0.1, 1),
    ]
