"""Who gets which request: groups keep their engine, engines are evenly busy, nothing is lost and nothing is done twice."""

import numpy as np

from rlhf_host.distributed.ray.dispatch import Dispatcher, Ticket


def dispatcher(lanes, capacity=None):
    found = Dispatcher(lanes)
    for lane in found.lanes:
        lane.open, lane.capacity = True, capacity
    return found


def arrive(queue, *requests, first=0):
    tickets = [Ticket(first + i, group, tokens) for i, (group, tokens) in enumerate(requests)]
    queue.arrived += tickets
    return tickets


def numbers(batches):
    return [[ticket.number for ticket in batch] for batch in batches]


def test_a_group_goes_to_one_engine_and_its_next_turns_too():
    queue = dispatcher(2)
    arrive(queue, ("a", 10), ("b", 10), ("a", 10), ("b", 10))
    assert numbers(queue.deal()) == [[0, 2], [1, 3]]
    for number in range(4):
        queue.answered(queue.lanes[number % 2], number)
    arrive(queue, ("b", 10), ("a", 10), first=4)
    assert numbers(queue.deal()) == [[5], [4]]


def test_new_groups_go_where_the_fewest_tokens_are_in_flight():
    queue = dispatcher(2)
    arrive(queue, ("long", 80))
    queue.deal()
    arrive(queue, ("a", 30), ("b", 30), ("c", 30), ("d", 30), first=1)
    assert numbers(queue.deal()) == [[4], [1, 2, 3]]


def test_groups_of_unequal_weight_even_out():
    queue = dispatcher(4)
    sizes = (np.random.default_rng(0).pareto(1.5, size=200) * 50 + 10).clip(max=1000).astype(int)
    arrive(queue, *((group, int(size)) for group, size in enumerate(sizes)))
    queue.deal()
    loads = [lane.tokens for lane in queue.lanes]
    assert max(loads) <= 1.03 * sum(loads) / 4


def test_an_engine_gets_no_more_than_it_has_room_for_and_the_rest_goes_to_whoever_is_free():
    queue = dispatcher(2, capacity=2)
    arrive(queue, *((group, 10) for group in range(8)))
    assert numbers(queue.deal()) == [[0, 2], [1, 3]]
    fast = queue.lanes[1]
    for number in (1, 3):
        queue.answered(fast, number)
    assert numbers(queue.deal()) == [[], [4, 5]]
    for number in (4, 5):
        queue.answered(fast, number)
    assert numbers(queue.deal()) == [[], [6, 7]]
    assert not queue.waits


def test_what_a_dead_engine_had_is_dealt_again_to_others():
    queue = dispatcher(2, capacity=2)
    arrive(queue, ("a", 10), ("b", 10), ("a", 10), ("a", 10))
    assert numbers(queue.deal()) == [[0, 2], [1]]
    dead, other = queue.lanes
    queue.answered(dead, 0)
    assert queue.close(dead) == 2
    assert (dead.tokens, dead.sent, len(dead.waiting)) == (0, {}, 0)
    assert numbers(queue.deal()) == [[], [2]]
    assert queue.answered(dead, 2) is None  # a late answer of the dead one counts nowhere
    queue.answered(other, 1)
    queue.answered(other, 2)
    assert numbers(queue.deal()) == [[], [3]]


def test_while_no_engine_is_up_requests_wait():
    queue = dispatcher(1)
    arrive(queue, ("a", 10))
    queue.deal()
    queue.close(queue.lanes[0])
    assert numbers(queue.deal()) == [[]]
    assert queue.waits
    queue.lanes[0].open = True
    assert numbers(queue.deal()) == [[0]]


def test_what_nobody_waits_for_is_not_sent():
    queue = dispatcher(1, capacity=1)
    sent, waiting, late = arrive(queue, ("a", 10), ("b", 10), ("c", 10))
    queue.deal()
    assert queue.drop(waiting) is None
    assert queue.drop(sent) is queue.lanes[0]  # this one has to be aborted there
    queue.answered(queue.lanes[0], sent.number)
    assert numbers(queue.deal()) == [[late.number]]
    queue.answered(queue.lanes[0], late.number)
    assert queue.lanes[0].tokens == 0


def test_drain_gives_everything_unanswered_once():
    queue = dispatcher(2, capacity=1)
    tickets = arrive(queue, *((group, 10) for group in range(5)))
    queue.deal()
    arrive(queue, ("late", 10), first=5)
    queue.drop(tickets[4])
    assert sorted(ticket.number for ticket in queue.drain()) == [0, 1, 2, 3, 5]
    assert not queue.waits
    assert queue.in_flight == 0


def test_what_a_dead_engine_had_goes_before_what_waits_already():
    queue = dispatcher(2, capacity=1)
    arrive(queue, *((name, 10) for name in "abcdef"))
    assert numbers(queue.deal()) == [[0], [1]]
    dead, other = queue.lanes
    queue.close(dead)
    queue.answered(other, 1)
    assert numbers(queue.deal()) == [[], [0]]
