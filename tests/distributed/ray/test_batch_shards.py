"""Shards: every row goes to one rank, ranks get about equally many tokens, and what arrives is what was sent."""

import dataclasses
import pickle
import random

import numpy as np
import pytest
import torch
from rlhf_authoring.tensors import make_batch

from rlhf_host.distributed.ray.batch_shards import PASSES, UPDATES, Ragged, deal_rows, make_shards
from rlhf_host.models.flops import ModelFlops
from rlhf_host.records.ragged import RaggedTensor, Rows, padded
from rlhf_host.records.tensors import Batch, TopK
from rlhf_host.training.batching import deal


def tokens(batch, rows):
    """Prompt once per group, completions per row: what a rank computes."""
    groups = {int(batch.group_id[row]): len(batch.prompt_ids[row]) for row in rows}
    return sum(groups.values()) + int(batch.lengths[rows].sum())


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_balanced_within_a_few_percent_where_rows_are_not(count, seed):
    lengths = (np.random.default_rng(seed).pareto(1.5, size=512) * 20 + 1).clip(max=400).astype(int).tolist()
    batch = make_batch(lengths, groups=[row // 8 for row in range(512)])
    hands = deal_rows(batch, count, unit_rows=False)
    assert sorted(row for rows in hands for row in rows) == list(range(512))
    loads = [tokens(batch, rows) for rows in hands]
    assert max(loads) <= 1.03 * sum(loads) / count


@pytest.mark.parametrize(("ranks", "count"), [(8, 128), (48, 512), (512, 4096)])
def test_no_rank_works_much_longer_than_the_others(ranks, count):
    flops, dice = ModelFlops(body=6 * 7.6e9, head=0.0, attention=28 * 3584), random.Random(0)
    lengths = [min(32768, int(dice.lognormvariate(8.0, 1.0)) + 200) for _ in range(count)]

    def slowest(sizes):
        loads = [
            sum(flops.work(0, [lengths[row]]) for [row] in hand) for hand in deal([[i] for i in range(count)], sizes, ranks)
        ]
        return max(loads) * ranks / sum(loads)

    assert slowest([flops.work(0, [length]) for length in lengths]) <= 1.05 < slowest(lengths)


def test_rows_are_dealt_by_work_where_the_model_is_known():
    batch = make_batch([64, 32, 32, 32])
    by_tokens = deal_rows(batch, 2, unit_rows=False)
    assert [int(batch.lengths[rows].sum()) for rows in by_tokens] == [96, 64]
    long_rows_are_slow = ModelFlops(body=1.0, head=0.0, attention=1000)
    assert deal_rows(batch, 2, unit_rows=False, flops=long_rows_are_slow) == [[0], [1, 2, 3]]


def test_a_group_stays_together_while_that_is_even_enough():
    batch = make_batch([10] * 16, groups=[row // 4 for row in range(16)])
    assert deal_rows(batch, 2, unit_rows=False) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]


def test_one_large_group_is_split():
    batch = make_batch([50, 50, 50, 50], groups=[0, 0, 0, 0])
    assert sorted(map(len, deal_rows(batch, 2, unit_rows=False))) == [2, 2]


def test_rows_of_one_unit_are_never_split():
    batch = make_batch([50, 50, 1, 1], groups=[0, 0, 1, 1])
    batch.unit_id = torch.tensor([7, 7, 8, 8])
    assert deal_rows(batch, 2, unit_rows=True) == [[0, 1], [2, 3]]


def test_ranks_without_work_get_an_empty_share():
    batch = make_batch([5, 3])
    hands = deal_rows(batch, 4, unit_rows=False)
    assert sorted(hands) == [[], [], [0], [1]]
    empty = next(make_shards(batch, [[]], PASSES)).batch()
    assert len(empty) == 0
    assert empty.completion_ids.shape[0] == 0


def test_what_arrives_is_what_was_sent_without_the_records():
    batch = make_batch([3, 6, 2], observations=True)
    batch.advantages = torch.randn(batch.action_mask.shape) * batch.completion_mask
    batch.logprobs["reference"] = torch.randn(batch.action_mask.shape) * batch.completion_mask
    batch.extra["mine"] = {"weights": torch.arange(3.0), "scale": 2.0}
    batch.distributions["teacher"] = TopK(
        *(torch.randn(*batch.action_mask.shape, 2) * batch.completion_mask[..., None] for _ in range(2))
    )
    batch.trajectories = ["record"] * 3
    batch.extra["mine"]["padded"] = torch.full(batch.action_mask.shape, 7.0)
    tokens, more = (
        pickle.loads(pickle.dumps(next(make_shards(batch, [[2, 0]], names)), protocol=5)) for names in (PASSES, UPDATES)
    )
    assert tokens.rows == more.rows == [2, 0]
    found, expected = tokens.batch(more), batch.batch().select([2, 0])
    assert type(found) is Batch, "neither rewards nor records"
    for field in dataclasses.fields(expected):
        value = getattr(expected, field.name)
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(getattr(found, field.name), value, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.logprobs["reference"], expected.logprobs["reference"])
    assert torch.equal(found.extra["mine"]["weights"], torch.tensor([2.0, 0.0]))
    assert found.extra["mine"]["scale"] == 2.0
    assert torch.equal(found.extra["mine"]["padded"], torch.full((2, 3), 7.0)), "padding that is a plugin's"
    for ours, theirs in zip(found.distributions["teacher"], expected.distributions["teacher"], strict=True):
        assert torch.equal(ours, theirs)
    assert found.prompt_ids == expected.prompt_ids
    assert found.turn_ids.dtype == found.completion_ids.dtype == torch.int64


def test_a_pass_gets_no_more_than_it_takes_and_no_padding():
    batch = make_batch([1, 90, 2, 3])
    (shard,) = make_shards(batch, [[0, 1, 2, 3]], PASSES)
    assert shard.fields["completion_ids"].values.nbytes == 4 * 96
    found = shard.batch()
    assert torch.equal(found.completion_ids, batch.completion_ids)
    assert found.sampler_logprobs is None


def plain_field(name, value, batch, rows):
    """A rank's part of a field, token by token from padded tensors."""
    if isinstance(value, dict):
        return {key: plain_field(name, item, batch, rows) for key, item in value.items()}
    if isinstance(value, TopK):
        return TopK(*(plain_field(name, item, batch, rows) for item in value))
    if not isinstance(value, torch.Tensor):
        return value
    value, lengths = padded(value), batch.lengths.tolist()
    if not value.shape or len(value) != len(batch):
        return value.numpy()
    if value.shape[:2] != batch.completion_mask.shape:
        return value[rows].numpy()
    if name == "extra":
        return value[rows, : max((lengths[row] for row in rows), default=0)].numpy()
    cells = [value[row, place] for row in rows for place in range(lengths[row])]
    tokens = torch.stack(cells) if cells else value.new_zeros(0, *value.shape[2:])
    stored = tokens.to(torch.int32) if value.dtype == torch.int64 else tokens
    return Ragged(stored.numpy(), value.dtype, -1 if name == "turn_ids" else 0)


def assert_equal(one, two):
    assert type(one) is type(two)
    if isinstance(one, np.ndarray):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)
    elif isinstance(one, Ragged | TopK):
        for ours, theirs in zip(one, two, strict=True):
            assert_equal(ours, theirs)
    elif isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            assert_equal(one[key], two[key])
    else:
        assert one == two


def random_batch(random):
    """Rows of 0 to 12 tokens, with everything that a batch may hold; padded, or ragged but for what a plugin wrote to."""
    count = int(random.integers(1, 20))
    lengths = random.integers(1, 13, count).tolist()
    batch = make_batch(lengths, groups=[row // 3 for row in range(count)], observations=True, seed=int(random.integers(1000)))
    rows, mask = Rows.of(batch.completion_mask), batch.completion_mask
    batch.logprobs["reference"], batch.advantages = (torch.randn(mask.shape) * mask for _ in range(2))
    batch.columns["label"], batch.token_columns["weight"] = torch.rand(count), torch.rand(mask.shape) * mask
    batch.distributions["teacher"] = TopK(torch.rand(*mask.shape, 2), torch.randint(0, 9, (*mask.shape, 2)))
    batch.extra["mine"] = {"a": torch.rand(mask.shape), "b": torch.rand(count, 3), "c": torch.rand(4), "d": 1.5}
    if random.random() < 0.7:
        keep = iter(random.random(100) < 0.2)

        def change(name, value):
            if value.shape[:2] != mask.shape or name == "extra" or next(keep):
                return value
            return RaggedTensor(rows.tokens(value), rows, -1 if name == "turn_ids" else 0)

        batch = batch.batch().map(change)
        batch.extra["mine"]["ragged"] = RaggedTensor(torch.rand(rows.count), rows, 7.0)
        if isinstance(batch.advantages, RaggedTensor):
            batch.advantages[0, 0] = 3.0
    return batch


@pytest.mark.parametrize("seed", range(30))
def test_a_rank_gets_what_picking_its_tokens_one_by_one_gives(seed):
    random = np.random.default_rng(seed)
    batch = random_batch(random)
    places = random.permutation(len(batch)).tolist()
    cuts = sorted(random.integers(0, len(batch) + 1, 4).tolist())
    rows_of_ranks = [places[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(batch)], strict=True)] + [[]]
    for names in (PASSES, UPDATES):
        for rows, shard in zip(rows_of_ranks, make_shards(batch, rows_of_ranks, names), strict=True):
            assert shard.rows == rows
            assert shard.lengths.tolist() == batch.lengths[rows].tolist()
            for name in names:
                if name == "prompt_ids":
                    assert shard.fields[name] == [list(batch.prompt_ids[row]) for row in rows]
                elif name != "completion_mask":
                    assert_equal(shard.fields[name], plain_field(name, getattr(batch, name), batch, rows))
            assert shard.fields.get("completion_mask") is None


def test_rows_that_a_plugin_ordered_anew_are_sent_as_they_are():
    batch = make_batch([3, 1, 2])
    rows, order = Rows.of(batch.completion_mask), torch.tensor([1, 2, 0])
    batch.advantages = RaggedTensor(torch.arange(6.0), rows)[order]
    batch.extra["mine"] = {"baseline": RaggedTensor(torch.arange(6.0), rows)[order]}
    first, second = make_shards(batch, [[0, 2], [1]], UPDATES)
    assert (first.fields["advantages"].values.tolist(), second.fields["advantages"].values.tolist()) == ([3, 0, 0, 0, 1], [4])
    assert second.fields["extra"]["mine"]["baseline"].tolist() == [[4.0]]


def test_hands_are_those_of_looking_for_the_smallest_each_time():
    sizes = np.random.default_rng(1).integers(1, 50, 300).tolist()
    loads, hands = [0] * 37, [[] for _ in range(37)]
    for number in sorted(range(300), key=lambda i: (-sizes[i], i)):
        hand = loads.index(min(loads))
        loads[hand] += sizes[number]
        hands[hand].append([number])
    assert deal([[number] for number in range(300)], sizes, 37) == [sorted(hand) for hand in hands]
