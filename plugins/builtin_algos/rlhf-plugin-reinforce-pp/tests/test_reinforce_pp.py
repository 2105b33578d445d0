"""REINFORCE++ and its baseline variant against hand-worked cases and float64 loops."""

import importlib.metadata
import inspect

import pytest
import rlhf_plugin_reinforce_pp
import torch
from pydantic import ValidationError
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_reinforce_pp import ReinforcePP, ReinforcePPBaseline

from rlhf_host import SEQUENCE_MEAN_TOKEN_MEAN, LossTerm, Output, Outputs
from rlhf_host import functional as F

BOTH = [ReinforcePP, ReinforcePPBaseline]


def advantages(batch, algorithm=ReinforcePP, **options):
    made = algorithm(algorithm.Options(**options))
    if made.needs().min_group_size > 1:  # as the host does
        batch.loss_mask = batch.loss_mask & F.with_siblings(batch)
    return made.compute_advantages(batch).advantages


def mixed_batch():
    """Unequal, scattered groups, one of them a single sample; two trajectories of one episode; observations; KL; a row that
    another plugin took out of the loss."""
    batch = make_batch([7, 4, 9, 1, 6, 5, 8, 2], groups=[0, 1, 0, 2, 1, 0, 1, 1], seed=5, observations=True)
    batch.episode_id = torch.tensor([0, 1, 2, 3, 4, 5, 6, 6])
    batch.shaped = 0.1 * torch.randn(batch.action_mask.shape, generator=torch.Generator().manual_seed(2))
    batch.token_rewards = batch.token_rewards + 0.05 * batch.action_mask
    batch.loss_mask = batch.action_mask.clone()
    batch.loss_mask[4] = False
    return batch


def tokens(batch, row):
    """Columns of the row's action tokens, in order."""
    return [column for column, acts in enumerate(batch.action_mask[row].tolist()) if acts]


def whitened(values, counted, how):
    """``values`` of ``counted`` (row, column) pairs, 0 elsewhere; population variance."""
    chosen = [values[place] for place in counted]
    mean = sum(chosen) / len(chosen)
    std = (sum((x - mean) ** 2 for x in chosen) / len(chosen)) ** 0.5
    scaled = {"full": lambda x: (x - mean) / std, "center": lambda x: x - mean, "none": lambda x: x}[how]
    return {place: scaled(values[place]) for place in counted}


def table(batch, values):
    found = torch.zeros(batch.action_mask.shape)
    for place, value in values.items():
        found[place] = value
    return found


def returns_by_loop(batch, gamma):
    values = {}
    for row in range(len(batch)):
        running = 0.0
        for column in reversed(tokens(batch, row)):
            running = float(batch.token_rewards[row, column]) + float(batch.shaped[row, column]) + gamma * running
            values[row, column] = running
    return values


def baseline_by_loop(batch):
    episodes: dict[int, dict[int, list[float]]] = {}
    for group, episode, reward in zip(batch.group_id.tolist(), batch.episode_id.tolist(), batch.rewards.tolist(), strict=True):
        episodes.setdefault(group, {}).setdefault(episode, []).append(reward)
    values = {}
    for row, group in enumerate(batch.group_id.tolist()):
        members = [sum(rewards) / len(rewards) for rewards in episodes[group].values()]
        running = 0.0
        for column in reversed(tokens(batch, row)):
            running += float(batch.shaped[row, column])
            values[row, column] = float(batch.rewards[row]) - sum(members) / len(members) + running
    return values


@pytest.mark.parametrize("how", ["full", "center", "none"])
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_pp_agrees_with_a_float64_loop(gamma, how):
    batch = mixed_batch()
    counted = [(row, column) for row, column in batch.loss_mask.nonzero().tolist()]
    expected = table(batch, whitened(returns_by_loop(batch, gamma), counted, how))
    torch.testing.assert_close(advantages(batch, gamma=gamma, whiten=how), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["full", "center", "none"])
def test_the_baseline_agrees_with_a_float64_loop(how):
    batch = mixed_batch()
    counted = [(row, column) for row, column in batch.loss_mask.nonzero().tolist() if row != 3]
    expected = table(batch, whitened(baseline_by_loop(batch), counted, how))
    torch.testing.assert_close(advantages(batch, ReinforcePPBaseline, whiten=how), expected, rtol=1e-5, atol=1e-6)


def test_hand_worked_returns():
    batch = make_batch([2, 1], groups=[0, 1], rewards=[4.0, 1.0])
    assert advantages(batch, gamma=0.5, whiten="none").tolist() == [[2, 4], [1, 0]]
    assert advantages(batch, whiten="center").tolist() == [[1, 1], [-2, 0]]
    # Mean 3, variance (1 + 1 + 4)/3 = 2.
    assert advantages(batch)[0].tolist() == pytest.approx([0.5**0.5, 0.5**0.5])
    assert advantages(batch)[1].tolist() == pytest.approx([-(2**0.5), 0.0])


def test_hand_worked_baseline():
    batch = make_batch([2, 1], groups=[0, 0], rewards=[4.0, 1.0])
    batch.shaped = torch.tensor([[0.5, 0.25], [0.0, 9.0]])
    assert advantages(batch, ReinforcePPBaseline, whiten="none").tolist() == [[2.25, 1.75], [-1.5, 0]]


def test_observations_neither_discount_nor_carry_anything():
    batch = make_batch([7], groups=[0], rewards=[1.0], observations=True)
    assert batch.action_mask[0].tolist() == [True, True, False, True, True, False, True]
    expected = [0.5**4, 0.5**3, 0, 0.5**2, 0.5, 0, 1]
    assert advantages(batch, gamma=0.5, whiten="none")[0].tolist() == pytest.approx(expected)


def test_rewards_per_turn_reach_only_the_tokens_before_them():
    batch = make_batch([5], groups=[0], observations=True)
    batch.token_rewards = torch.tensor([[0.0, 1.0, 0.0, 0.0, 2.0]])
    assert advantages(batch, whiten="none").tolist() == [[3, 3, 0, 2, 2]]


@pytest.mark.parametrize("reward", [0.0, 0.1, -3.3, 1e6])
@pytest.mark.parametrize("how", ["none", "center"])
def test_the_baseline_gives_a_group_without_variance_exactly_nothing(reward, how):
    batch = make_batch([3] * 8, groups=[0] * 8, rewards=[reward] * 8)
    assert advantages(batch, ReinforcePPBaseline, whiten=how).eq(0).all()
    assert advantages(batch, ReinforcePPBaseline).eq(0).all()


def test_the_baseline_leaves_a_sample_without_siblings_out_of_its_statistics():
    batch = make_batch([2, 2, 2], groups=[0, 0, 1], rewards=[1.0, 0.0, 100.0])
    batch.shaped = torch.full(batch.action_mask.shape, -0.25)
    found = advantages(batch, ReinforcePPBaseline)
    assert torch.equal(found[:2], advantages(batch.select([0, 1]), ReinforcePPBaseline))
    assert found[2].eq(0).all()


def test_reinforce_pp_takes_single_samples():
    assert ReinforcePP(ReinforcePP.Options()).needs().min_group_size == 1
    assert ReinforcePPBaseline(ReinforcePPBaseline.Options()).needs().min_group_size == 2


@pytest.mark.parametrize("algorithm", BOTH)
def test_needs_what_the_loss_wants(algorithm):
    needs = algorithm(algorithm.Options(entropy_coef=0.01)).needs()
    assert (needs.data, needs.outputs) == ("prompts", (Output("entropy"),))
    assert [(role.name, role.trainable) for role in needs.roles] == [("actor", True)]


@pytest.mark.parametrize("algorithm", BOTH)
@pytest.mark.parametrize("how", ["full", "center", "none"])
def test_huge_rewards_stay_finite(algorithm, how):
    batch = make_batch([2, 3, 2, 2], groups=[0, 0, 1, 1], rewards=[1e6, -1e6, 1e6, 0.0])
    found = advantages(batch, algorithm, whiten=how)
    assert found.isfinite().all()
    assert found[0, 0] > 0 > found[1, 0]


@pytest.mark.parametrize("algorithm", BOTH)
def test_permuting_the_rows_permutes_the_advantages(algorithm):
    batch = mixed_batch()
    order = [4, 2, 0, 7, 5, 1, 3, 6]
    moved = advantages(batch.select(order, trim=False), algorithm)
    torch.testing.assert_close(moved, advantages(batch, algorithm)[order], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("algorithm", BOTH)
@pytest.mark.parametrize("how", ["full", "center", "none"])
def test_what_is_masked_changes_nothing(algorithm, how):
    batch = mixed_batch()
    clean = advantages(batch, algorithm, whiten=how)
    assert clean[~batch.loss_mask].eq(0).all()
    for tensor in (batch.shaped, batch.token_rewards):
        tensor[~batch.action_mask] = float("nan")
    assert torch.equal(advantages(batch, algorithm, whiten=how), clean)


@pytest.mark.parametrize("algorithm", BOTH)
def test_the_loss_pulls_towards_what_is_better_than_the_rest(algorithm):
    batch = make_batch([2, 3], groups=[0, 0], rewards=[1.0, 0.0])
    plugin = algorithm(algorithm.Options(aggregation="sequence-mean-token-mean"))
    batch.advantages = plugin.compute_advantages(batch).advantages
    outputs = Outputs(logprobs=batch.sampler_logprobs.clone())
    (term,) = [item for item in plugin.compute_loss(outputs, batch) if isinstance(item, LossTerm)]
    assert term.values[0, :2].lt(0).all()
    assert term.values[1].gt(0).all()
    assert (term.aggregation, term.corrected) == (SEQUENCE_MEAN_TOKEN_MEAN, True)


def test_the_discount_belongs_to_reinforce_pp_alone():
    with pytest.raises(ValidationError, match="gamma"):
        ReinforcePPBaseline.Options(gamma=0.9)
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        ReinforcePP.Options(gamma=1.1)


def test_the_package_is_small_and_found_by_its_entry_points():
    entries = importlib.metadata.entry_points(group="rlhf.algos")
    found = {e.name: e.load() for e in entries if e.module == "rlhf_plugin_reinforce_pp"}
    assert found == {"reinforce_pp": ReinforcePP, "reinforce_pp_baseline": ReinforcePPBaseline}
    lines = [line for line in inspect.getsource(rlhf_plugin_reinforce_pp).splitlines() if line.strip()]
    assert len(lines) <= 150
