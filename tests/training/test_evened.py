"""Micro-batches of ranks that wait for each other in every pass."""

import random
from types import SimpleNamespace

from rlhf_authoring.tensors import make_batch

from rlhf_host import Needs
from rlhf_host.backends.one_process import OneProcess
from rlhf_host.config.schema import TrainConfig
from rlhf_host.protocols import BackendTraits
from rlhf_host.training.batching import evened, plan_microbatches
from rlhf_host.training.worker import Worker

BUDGET = 64


def planned(lengths, cost, count=None):
    """Micro-batches of rows of these lengths; cost and work of a pass are the same here."""
    units = [[row] for row in range(len(lengths))]
    plan = plan_microbatches(units, lengths, BUDGET, cost)
    return plan, evened(plan, count or len(plan), units, BUDGET, cost, cost)


def packed(lengths):
    return lambda rows: sum(lengths[row] for row in rows)


def test_a_rank_with_less_to_do_does_some_of_it_in_every_pass():
    lengths = [16] * 12
    plan, parts = planned(lengths, packed(lengths), count=4)
    assert [len(rows) for rows in plan] == [4, 4, 4]
    assert [len(rows) for rows in parts] == [3, 3, 3, 3]
    assert sorted(row for rows in parts for row in rows) == list(range(12))


def test_ranks_wait_less_for_each_other():
    def slowest(ranks):
        return sum(max(map(sum, passes)) for passes in zip(*ranks, strict=True))

    dice, before, after = random.Random(0), [], []
    for _ in range(8):
        lengths = [dice.randint(1, 32) for _ in range(dice.randint(20, 30))]
        plan, _ = planned(lengths, packed(lengths))
        before.append([[lengths[row] for row in rows] for rows in plan])
        parts = planned(lengths, packed(lengths), count=9)[1]
        after.append([[lengths[row] for row in rows] for rows in parts])
    before = [plan + [[]] * (9 - len(plan)) for plan in before]
    assert slowest(after) < slowest(before)
    assert max(sum(part) for parts in after for part in parts) <= BUDGET


def test_rows_that_would_be_padded_more_stay_beside_rows_of_their_length():
    lengths = [32, 30, 4, 4, 4, 4]
    plan, parts = planned(lengths, lambda rows: len(rows) * max(lengths[row] for row in rows))
    assert parts == plan == [[0, 1], [2, 3, 4, 5]]


def test_the_heaviest_pass_comes_first_on_every_rank():
    lengths = [4, 4, 32, 32]
    cost = lambda rows: len(rows) * max(lengths[row] for row in rows)  # noqa: E731
    assert evened([[0, 1], [2, 3]], 2, [[0], [1], [2], [3]], BUDGET, cost, cost) == [[2, 3], [0, 1]]


def test_a_rank_without_rows_gets_empty_passes():
    assert evened([], 3, [], BUDGET, len, len) == [[], [], []]


def test_rows_that_need_a_pass_each_keep_it_where_ranks_run_as_many():
    class Passes:
        one_by_one = True

        def prepare(self, longest, pictured=False):
            pass

        def cost(self, prompts, completions, groups):
            return sum(map(len, prompts)) + sum(completions)

        tokens = flops = cost

    class TwoRanks(OneProcess):
        """The other rank runs one pass more."""

        def gather(self, value):
            return [value, value + 1]

    batch = make_batch([4, 4, 4], groups=[0, 0, 0])
    worker = Worker({}, None, TrainConfig(), Needs(), TwoRanks())
    role = SimpleNamespace(passes=Passes(), traits=BackendTraits(even_passes=True))
    plan = worker._plan(role, batch, range(3))
    assert sorted(plan) == [[], [0], [1], [2]]
