"""Shards: every row goes to one rank, ranks get about equally many tokens, and what arrives is what was sent."""

import dataclasses
import pickle

import numpy as np
import pytest
import torch
from rlhf_authoring.tensors import make_batch

from rlhf_host.records.tensors import Batch, TopK
from rlhf_host.runtimes.batch_shards import PASSES, UPDATES, deal_rows, make_shards


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
    empty = make_shards(batch, [[]], PASSES)[0].batch()
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
        pickle.loads(pickle.dumps(make_shards(batch, [[2, 0]], names)[0], protocol=5)) for names in (PASSES, UPDATES)
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
