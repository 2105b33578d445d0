"""RLOO against hand-worked cases and a float64 loop."""

import importlib.metadata
import inspect

import pytest
import rlhf_plugin_rloo
import torch
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_rloo import RLOO, Options


def advantages(batch, **options):
    return RLOO(Options(**options)).compute_advantages(batch).advantages


def test_hand_worked_group_on_every_action_token():
    batch = make_batch([2, 3, 1, 2], groups=[0, 0, 0, 0], rewards=[1.0, 0.0, 0.0, 1.0])
    found = advantages(batch)
    expected = [2 / 3, -2 / 3, -2 / 3, 2 / 3]
    for row, (value, length) in enumerate(zip(expected, [2, 3, 1, 2], strict=True)):
        assert found[row, :length].tolist() == pytest.approx([value] * length)
        assert found[row, length:].eq(0).all()


def test_the_kl_in_the_reward_is_part_of_the_sequence_reward():
    batch = make_batch([2, 3, 4], groups=[1, 1, 1], seed=3)
    batch.shaped = torch.rand(batch.action_mask.shape, generator=torch.Generator().manual_seed(1))
    total = [
        float(r) + float(s[m].double().sum()) for r, s, m in zip(batch.rewards, batch.shaped, batch.action_mask, strict=True)
    ]
    expected = [total[i] - sum(total[j] for j in range(3) if j != i) / 2 for i in range(3)]
    assert advantages(batch)[:, 0].tolist() == pytest.approx(expected, rel=1e-5)


def test_suffix_placement_keeps_the_kl_out_of_the_baseline():
    batch = make_batch([3, 3], groups=[0, 0], rewards=[1.0, 0.0])
    batch.shaped = torch.tensor([[0.1, 0.2, 0.4], [0.0, 0.0, 0.0]])
    found = advantages(batch, kl_placement="suffix")
    assert found[0].tolist() == pytest.approx([1.7, 1.6, 1.4])
    assert found[1].tolist() == pytest.approx([-1.0, -1.0, -1.0])


def test_observation_tokens_get_nothing():
    batch = make_batch([7, 7], groups=[0, 0], rewards=[1.0, -1.0], observations=True)
    assert advantages(batch)[~batch.action_mask].eq(0).all()
    assert advantages(batch)[0][batch.action_mask[0]].eq(2.0).all()


def test_a_sample_without_siblings_gets_nothing():
    batch = make_batch([2, 2, 2], groups=[0, 0, 1])
    assert advantages(batch)[2].eq(0).all()
    assert RLOO(Options()).needs().min_group_size == 2


def test_permuting_the_rows_permutes_the_advantages():
    batch = make_batch([3, 5, 2, 4, 1, 6], groups=[0, 1, 0, 2, 1, 0], seed=7)
    order = [4, 2, 0, 5, 1, 3]
    assert torch.equal(advantages(batch)[order], advantages(batch.select(order, trim=False)))


def test_the_plugin_fits_on_a_screen_and_is_found_by_its_entry_point():
    (entry,) = [e for e in importlib.metadata.entry_points(group="rlhf.algos") if e.name == "rloo"]
    assert entry.load() is RLOO
    lines = [line for line in inspect.getsource(rlhf_plugin_rloo).splitlines() if line.strip()]
    assert len(lines) < 60
