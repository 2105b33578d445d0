"""A batch on the controller holds no padding: algorithms give the same bits as with padded tensors, and nothing pads the whole."""

import numpy as np
import pytest
import torch
from rlhf_plugin_grpo import GDPO, GRPO
from rlhf_plugin_ppo import PPO
from rlhf_plugin_reinforce_pp import ReinforcePP, ReinforcePPBaseline
from rlhf_plugin_rloo import RLOO

from rlhf_host.distributed.ray.batch_shards import PASSES, UPDATES, deal_rows, make_shards
from rlhf_host.records import ragged, ragged_operations
from rlhf_host.records.episodes import Group, Reward, Segment, Task, Trajectory
from rlhf_host.records.ragged import RaggedTensor, padded
from rlhf_host.rollouts.experience import make_experience
from rlhf_host.training.reduction import Denominators

ALGORITHMS = {
    "rloo": (RLOO, {}),
    "rloo, suffix": (RLOO, {"kl_placement": "suffix"}),
    "grpo": (GRPO, {}),
    "grpo, turns": (GRPO, {"credit": "turn"}),
    "gdpo": (GDPO, {}),
    "ppo": (PPO, {"gamma": 0.9, "lam": 0.8, "lam_critic": 1.0, "bootstrap_truncated": True}),
    "reinforce_pp": (ReinforcePP, {"gamma": 0.9}),
    "reinforce_pp_baseline": (ReinforcePPBaseline, {}),
}


def experience(longest=40, groups=5, n=4):
    """Rows of two turns, whose lengths are few but for one."""
    dice = np.random.default_rng(0)
    made = []
    for number in range(groups):
        task = Task("task", index=number, prompt_ids=(1, 2, 3))
        rows = []
        for sample in range(n):
            first, second = (int(dice.integers(1, 6)) for _ in range(2))
            first = longest - second - 2 if (number, sample) == (0, 1) else first
            segments = [
                Segment("prompt", [1, 2, 3]),
                Segment("action", [7] * first, dice.random(first).tolist(), [1] * first),
                Segment("observation", [8, 9]),
                Segment("action", [6] * second, dice.random(second).tolist(), [2] * second),
            ]
            total = float(dice.random())
            rewards = {"a": Reward(total, turns=[0.0, total])}
            rows.append(
                Trajectory(f"{number}/{sample}", str(number), task, segments, sample=sample, reward=total, rewards=rewards)
            )
        made.append(Group(str(number), task, rows))
    batch = make_experience(made, {"a": 1.0}, step=1, max_new_tokens=longest, temperature=1.0)
    batch.values["critic"] = torch.where(batch.action_mask, batch.sampler_logprobs * 2, 0.0)
    batch.bootstrap["critic"] = torch.from_numpy(dice.random(len(batch))).float()
    batch.shaped = torch.where(batch.action_mask, batch.sampler_logprobs - 0.5, 0.0)
    return batch


@pytest.fixture
def narrow(monkeypatch):
    """No more than so many cells are padded at once."""
    whole = RaggedTensor.padded

    def bounded(self, index=None, width=None):
        cells = len(self.rows if index is None else index) * (self.rows.width if width is None else width)
        assert cells <= 500_000, f"{cells:,} cells are padded at once"
        return whole(self, index, width)

    monkeypatch.setattr(ragged.RaggedTensor, "padded", bounded)
    monkeypatch.setattr(ragged_operations, "PIECE", 300_000)


@pytest.mark.parametrize(("algorithm", "options"), ALGORITHMS.values(), ids=ALGORITHMS)
def test_an_algorithm_gives_the_same_bits_as_with_padded_tensors(algorithm, options):
    plugin, batch = algorithm(algorithm.Options(**options)), experience()
    plain = batch.map(lambda _, tensor: padded(tensor))
    ours, theirs = plugin.compute_advantages(batch), plugin.compute_advantages(plain)
    assert type(theirs.advantages) is torch.Tensor
    for one, two in ((ours.advantages, theirs.advantages), (ours.returns, theirs.returns)):
        assert one is two is None or isinstance(one, RaggedTensor)
        # Only whitening, a sum over the batch, has another order; it is in float64.
        assert one is None or torch.equal(padded(one), two)


@pytest.mark.parametrize(("algorithm", "options"), ALGORITHMS.values(), ids=ALGORITHMS)
def test_one_long_row_pads_no_other(algorithm, options, narrow):
    batch = experience(longest=300_000)  # padded, a column has six million cells
    answer = algorithm(algorithm.Options(**options)).compute_advantages(batch)
    batch.advantages, batch.returns = answer.advantages, answer.returns
    whole = Denominators.of(batch)
    rows = deal_rows(batch, 3, unit_rows=False)
    tokens = sum(len(shard.fields["advantages"].values) for shard in make_shards(batch, rows, UPDATES))
    assert tokens == int(whole.masks["completion_mask"].sum()) == int(batch.lengths.sum())
    assert sum(len(shard.fields["completion_ids"].values) for shard in make_shards(batch, rows, PASSES)) == tokens
    assert all(column.whole is None for column in (batch.completion_ids, batch.action_mask, batch.loss_mask, batch.versions))
