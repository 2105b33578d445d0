"""GMPO, LUSPO, VESPO, OPO, OTB and ReMax against verl and TRL; MaxRL and GiGPO against loops in float64."""

from __future__ import annotations

import importlib
import statistics
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_group_methods import GMPO, LUSPO, OPO, OTB, VESPO, GiGPO, MaxRL
from rlhf_plugin_remax import ReMax

from rlhf_host import Outputs, Segment, Task, Trajectory

from .conftest import _borrowed


def of(case, plugin, **options):
    plugin = plugin(plugin.Options(**options))
    return case.reduced(lambda logprobs: plugin.compute_loss(Outputs(logprobs=logprobs), case.batch))


@pytest.fixture(scope="session")
def gmpo():
    with _borrowed("trl"):
        return importlib.import_module("trl.experimental.gmpo.gmpo_trainer").GMPOTrainer


@pytest.mark.parametrize("spread", [0.05, 0.6])
def test_gmpo_is_verls_whatever_the_advantages(make_case, same, verl, spread):
    case = make_case(spread=spread, per_token=False)
    theirs = verl.loss("geo_mean", case, clip_ratio_low=0.3, clip_ratio_high=0.4)
    same(of(case, GMPO, clip_eps=0.3, clip_eps_high=0.4), theirs, case.logprobs)


def test_gmpo_is_trls(make_case, same, gmpo):
    case = make_case(per_token=False)

    def theirs(logprobs):
        trainer = mock.MagicMock(top_entropy_quantile=1.0, beta=0.0, epsilon_low=0.3, epsilon_high=0.4)
        trainer._get_per_token_logps_and_entropies = lambda *a, **k: (logprobs, torch.zeros_like(logprobs), None)
        trainer.current_gradient_accumulation_steps = 1
        trainer.accelerator = SimpleNamespace(reduce=lambda x, reduction: x, gather=lambda x: x)
        inputs = {
            "prompt_ids": torch.zeros(len(case.mask), 1, dtype=torch.int64),
            "prompt_mask": torch.ones(len(case.mask), 1, dtype=torch.int64),
            "completion_ids": case.batch.completion_ids,
            "completion_mask": case.mask.double(),
            "advantages": case.advantages[:, 0],
            "old_per_token_logps": case.old,
        }
        return gmpo._compute_loss(trainer, None, inputs)

    same(of(case, GMPO, clip_eps=0.3, clip_eps_high=0.4), theirs, case.logprobs)


@pytest.mark.parametrize("spread", [4e-4, 0.3])
def test_luspo_is_trls(make_case, same, trl, spread):
    case = make_case(spread=spread, per_token=False)
    settings = {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 2e-3, "epsilon_high": 2.5e-3}
    same(of(case, LUSPO), trl.loss(case, **settings), case.logprobs)


@pytest.mark.parametrize("spread", [0.05, 0.6, 3.0])
def test_vespo_is_trls(make_case, same, trl, spread):
    case = make_case(spread=spread, per_token=False)
    same(of(case, VESPO), trl.loss(case, loss_type="vespo"), case.logprobs)


@pytest.mark.parametrize("zero_tail", [False, True])
@pytest.mark.parametrize("observations", [False, True])
def test_otb_is_verls_for_one_turn_and_for_several(make_case, verl, zero_tail, observations):
    """verl has a function for each; with observations the second packs action tokens as we do."""
    case = make_case((5, 7, 3, 6, 4, 9), observations=observations)
    batch, chances = case.batch, case.old.exp()
    collision = chances**2 + 0.4 * (1 - chances) ** 2
    batch.logprobs["actor"] = case.old.masked_fill(~case.mask, float("nan"))
    batch.collision["actor"] = collision.masked_fill(~case.mask, float("nan"))
    function = verl.core.compute_optimal_token_baseline_advantage
    if observations:
        function = verl.core.compute_multi_turn_optimal_token_baseline_advantage
    theirs = function(
        case.token_rewards, case.mask.double(), batch.group_id.numpy(), case.old, collision, handle_zero_tail=zero_tail
    )[0]
    found = OTB(OTB.Options(zero_tail=zero_tail)).compute_advantages(batch).advantages
    torch.testing.assert_close(found, theirs.float(), rtol=1e-4, atol=1e-5)


def test_remax_is_verls(make_case, verl):
    """verl gives the rewards of greedy answers apart, and leaves out none of its rows."""
    case = make_case((5, 7, 3, 6, 4, 9))
    batch = case.batch
    first = {group: batch.group_id.tolist().index(group) for group in batch.group_id.tolist()}
    greedy = torch.zeros(len(batch), dtype=torch.bool).index_fill(0, torch.tensor(list(first.values())), True)
    batch.columns["greedy"] = greedy.float()
    baselines = torch.stack([batch.rewards[first[group]] for group in batch.group_id.tolist()]).double()
    theirs = verl.core.compute_remax_outcome_advantage(case.token_rewards, baselines, case.mask.double())[0]
    found = ReMax(ReMax.Options()).compute_advantages(batch).advantages
    torch.testing.assert_close(found[~greedy], theirs[~greedy].float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [(5, 7, 3, 6, 4, 7), (1, 1, 9, 2, 2, 2)])
def test_opo_is_verls(make_case, verl, lengths):
    case = make_case(lengths)
    batch = case.batch
    theirs = verl.core.compute_opo_outcome_advantage(case.token_rewards, case.mask.double(), batch.group_id.numpy())[0]
    found = OPO(OPO.Options()).compute_advantages(batch).advantages
    torch.testing.assert_close(found, theirs.float(), rtol=1e-5, atol=1e-6)


def test_maxrl_divides_by_the_mean_of_the_group():
    batch = make_batch([2] * 8, groups=[0, 0, 0, 0, 1, 1, 1, 1], rewards=[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    found = MaxRL(MaxRL.Options()).compute_advantages(batch)
    assert found.advantages[:, 0].tolist() == pytest.approx([3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0])
    assert float(found.metrics[0].values.mean()) == 0.5


PLAYED = [
    # group, [(observation, reward), ...]: two groups of three; the states a and b are met again
    (0, [("a", 0.0), ("b", 1.0)]),
    (0, [("a", 0.5), ("a", 0.0), ("b", 2.0)]),
    (0, [("c", 0.25)]),
    (1, [("a", 1.0), ("b", 0.0)]),
    (1, [("b", 3.0)]),
    (1, [("b", 1.0), ("b", 1.0)]),
]


def played():
    """Each action is two tokens, each observation one."""
    lengths = [3 * len(turns) - 1 for _, turns in PLAYED]
    batch = make_batch(lengths, groups=[group for group, _ in PLAYED])
    batch.action_mask[:], batch.turn_ids[:], batch.token_rewards[:] = False, -1, 0.0
    for row, (group, turns) in enumerate(PLAYED):
        segments = [Segment("prompt", [7, ord(turns[0][0])])]
        for turn, (state, reward) in enumerate(turns):
            at = slice(3 * turn, 3 * turn + 2)
            batch.action_mask[row, at], batch.turn_ids[row, at] = True, turn
            batch.token_rewards[row, 3 * turn + 1] = reward
            if turn:
                segments.append(Segment("observation", [ord(state)]))
            segments.append(Segment("action", [1, 2]))
        batch.trajectories.append(Trajectory(f"e{row}", f"g{group}", Task("p"), segments))
    batch.rewards = batch.token_rewards.sum(-1)
    batch.loss_mask = batch.action_mask.clone()
    return batch


@pytest.mark.parametrize("std", ["none", "group"])
@pytest.mark.parametrize(("gamma", "coef"), [(0.95, 1.0), (1.0, 0.5), (0.0, 2.0)])
def test_gigpo_is_that_of_a_loop(std, gamma, coef):
    batch = played()

    def normal(values, value):
        if len(values) < 2 or max(values) - min(values) < 1e-9:
            return 0.0
        scale = statistics.stdev(values) + 1e-6 if std == "group" else 1.0
        return (value - statistics.fmean(values)) / scale

    returns, states, totals = {}, {}, {}
    for row, (group, turns) in enumerate(PLAYED):
        totals.setdefault(group, []).append(sum(reward for _, reward in turns))
        for turn, (state, _) in enumerate(turns):
            returns[row, turn] = sum(gamma**later * reward for later, (_, reward) in enumerate(turns[turn:]))
            # The first turn answers the prompt, which is longer than the observation of the same name.
            states.setdefault((group, state, turn == 0), []).append(returns[row, turn])
    options = {"gamma": gamma, "step_coef": coef, "std": std}
    found = GiGPO(GiGPO.Options(**options)).compute_advantages(batch).advantages
    for row, (group, turns) in enumerate(PLAYED):
        whole = normal(totals[group], sum(reward for _, reward in turns))
        for turn, (state, _) in enumerate(turns):
            step = normal(states[group, state, turn == 0], returns[row, turn])
            assert found[row, 3 * turn].item() == pytest.approx(whole + coef * step, abs=1e-5), (row, turn)
            assert found[row, 3 * turn + 1] == found[row, 3 * turn]
    assert not found[~batch.action_mask].any()
