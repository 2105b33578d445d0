"""Random schedules against the admission rules: the bound, every draw used once, no deadlock."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_host.rollouts.admission import Admission, InAdvance
from rlhf_host.rollouts.overtaking import Overtaking


class FreesEarly(Admission):
    """The defect that the proof leaves no room for: a place is free when its batch is taken."""

    def take(self):
        taken = super().take()
        self.held -= self._training * self.batch
        self._training = False
        return taken


def play(rules, draw, kept, steps=12, early=False):
    """A run in which finishing, training and publishing come in any order. Gives the largest age and the batches.

    Args:
        early: filters are asked as soon as a draw is over.
    """
    admitted_under, over, verdicts, given_back = {}, set(), {}, []
    batches, oldest, training = [], 0, None

    def admit():
        while rules.has_capacity:
            ordinal = rules.admit()
            admitted_under[ordinal] = rules.version
            verdicts.setdefault(ordinal, draw.random() < kept)

    admit()
    while len(batches) < steps:
        if training is None and (training := rules.take()) is not None:
            batches.append(training)
            of_batch = [ordinal for ordinal in training if verdicts[ordinal]]
            oldest = max([oldest, *(rules.version - admitted_under[ordinal] for ordinal in of_batch)])
            admit()
        running = [ordinal for ordinal in admitted_under if ordinal not in over]
        choices = [*running, *(["publish"] if training is not None else [])]
        assert choices, "nothing runs and nothing trains: a deadlock"
        chosen = draw.choice(choices)
        if chosen == "publish":
            training = None
            rules.publish(rules.version + 1)
        else:
            over.add(chosen)
            if early:
                rules.verdict(chosen, kept=verdicts[chosen])
            rules.over(chosen)
            while rules.unsettled in over and rules.unsettled < rules.admitted:
                rules.settle(kept=verdicts[rules.unsettled])
                for ordinal in rules.surplus():
                    del admitted_under[ordinal]
                    over.discard(ordinal)
                    given_back.append(ordinal)
        admit()
    return oldest, batches, verdicts


@settings(max_examples=2000, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_schedules(seed):
    draw = random.Random(seed)
    batch, depth, refills, kept = draw.randint(1, 5), draw.randint(0, 4), draw.randint(1, 4), draw.choice([1.0, 0.6, 0.2])
    rule = draw.choice([Admission, InAdvance]) if depth == 0 else Admission
    rules = rule(batch, depth, steps=12, budget=batch * (1 + refills))
    oldest, batches, verdicts = play(rules, draw, kept, early=draw.random() < 0.5)
    assert oldest <= depth
    used = [ordinal for taken in batches for ordinal in taken]
    assert used == list(range(len(used))), "in the order of the draws, each once"
    for taken in batches:
        count = sum(verdicts[ordinal] for ordinal in taken)
        assert len(taken) <= rules.budget
        assert count == batch or len(taken) == rules.budget
        assert count < batch or verdicts[taken[-1]], "nothing beyond the last one that is kept"
    if kept == 1.0:
        assert rules.admitted == 12 * batch, "nothing is drawn that is not trained"


class WaitsForNobody(Overtaking):
    """The defect that the bound does not survive: no draw has a deadline."""

    def take(self):
        most, self.max_staleness = self.max_staleness, 1000
        taken = super().take()
        self.max_staleness = most
        return taken


@settings(max_examples=2000, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_schedules_in_which_draws_are_passed(seed):
    draw = random.Random(seed)
    batch, depth, refills, kept = draw.randint(1, 5), draw.randint(1, 4), draw.randint(0, 4), draw.choice([1.0, 0.6, 0.2])
    most = depth + draw.randint(1, 4)
    rules = Overtaking(batch, depth, steps=12, budget=batch * (1 + refills), max_staleness=most)
    oldest, batches, verdicts = play(rules, draw, kept)
    assert oldest <= most
    used = [ordinal for taken in batches for ordinal in taken]
    assert len({*used}) == len(used), "each once"
    assert {*used} == {*range(rules.taken)} | rules.passed, "what no batch has is known"
    assert all(taken == sorted(taken) for taken in batches)
    for taken in batches:
        assert sum(verdicts[ordinal] for ordinal in taken) <= batch
    if kept == 1.0:
        assert all(len(taken) == batch for taken in batches)
        assert (rules.admitted, rules.taken, rules.passed) == (12 * batch, 12 * batch, set()), "nothing is left over"
    assert len(used) <= 12 * rules.budget


def test_the_schedules_notice_a_draw_without_a_deadline():
    ages = [play(WaitsForNobody(2, 1, steps=12, budget=16, max_staleness=2), random.Random(s), 1.0)[0] for s in range(50)]
    assert max(ages) > 2


def test_a_draw_is_passed_until_its_deadline():
    rules = Overtaking(2, 1, steps=9, budget=18, max_staleness=2)

    def begin():
        begun = []
        while rules.has_capacity:
            begun.append(rules.admit())
        return begun

    def end(*ordinals):
        for ordinal in ordinals:
            rules.over(ordinal)
            rules.settle(kept=True)

    assert begin() == [0, 1, 2, 3]
    end(3, 1)
    assert rules.take() == [1, 3]
    assert (rules.taken, rules.passed) == (0, {1, 3})
    assert begin() == [4, 5], "0 and 2 were passed, and others have their places"
    rules.publish(1)
    assert begin() == [6, 7]
    end(4, 5)
    assert rules.take() == [4, 5], "0 and 2 have time until version 2"
    rules.publish(2)
    end(*begin(), 6, 7)
    assert rules.take() is None, "0 and 2 are waited for"
    end(2)
    assert rules.take() is None
    end(0)
    assert rules.take() == [0, 2]
    assert (rules.taken, rules.passed) == (6, set())


def test_a_place_is_free_when_the_weights_are_with_the_engines():
    rules = Admission(2, 1, steps=9, budget=8)
    while rules.has_capacity:
        rules.admit()
    assert rules.admitted == 4
    for _ in range(4):
        rules.settle(kept=True)
    assert rules.take() == range(2)
    assert not rules.has_capacity
    rules.publish(1)
    assert rules.has_capacity


def test_the_schedules_notice_a_place_that_is_free_too_early():
    ages = [play(FreesEarly(2, 1, steps=12, budget=16), random.Random(seed), 1.0)[0] for seed in range(50)]
    assert max(ages) == 2


def test_a_dropped_draw_gives_its_place_to_the_next_one():
    rules = Admission(2, 0, steps=3, budget=18)
    assert [rules.admit(), rules.admit(), rules.has_capacity] == [0, 1, False]
    rules.settle(kept=False)
    assert rules.take() is None
    assert rules.has_capacity
    assert rules.admit() == 2
    rules.settle(kept=True)
    rules.settle(kept=True)
    assert rules.take() == range(3)


def test_a_place_is_free_before_the_turn_of_its_draw():
    rules = Admission(2, 0, steps=3, budget=8)
    assert [rules.admit(), rules.admit(), rules.has_capacity] == [0, 1, False]
    rules.verdict(1, kept=False)  # 0 is not over
    assert (rules.has_capacity, rules.admit(), rules.has_capacity) == (True, 2, False)
    for kept in (True, False, True):
        rules.settle(kept=kept)
    assert (rules.take(), rules.held) == (range(3), 2)


def test_a_place_is_not_free_before_its_turn_where_the_budget_may_end_its_batch():
    rules = Admission(2, 0, steps=3, budget=2)
    assert [rules.admit(), rules.admit()] == [0, 1]
    rules.verdict(1, kept=False)
    assert not rules.has_capacity


def test_draws_begin_in_advance_by_the_share_that_is_kept_and_the_surplus_is_given_back():
    rules = InAdvance(2, 0, steps=9, budget=18)

    def begin():
        begun = []
        while rules.has_capacity:
            begun.append(rules.admit())
        return begun

    assert begin() == [0, 1], "nothing is known yet"
    rules.verdict(1, kept=False)
    assert begin() == [2, 3, 4], "of two verdicts, with the one to begin with, half were kept: 0, 2, 3 and 4 may be two"
    rules.verdict(3, kept=True)
    rules.verdict(2, kept=True)
    rules.settle(kept=True)
    for kept in (False, True):
        rules.settle(kept=kept)
    assert rules.surplus() == range(3, 5), "0 and 2 are the batch, and these were begun for nothing"
    assert (rules.take(), begin()) == (range(3), []), "the weights are not with the engines"
    rules.publish(1)
    assert begin()[0] == 3


def test_a_budget_ends_a_batch():
    rules = Admission(2, 0, steps=3, budget=4)
    for number in range(4):
        assert rules.has_capacity
        rules.admit()
        assert rules.take() is None
        rules.settle(kept=number == 1)
    assert rules.take() == range(4)
