"""Replicas on the CPU share weights and sum to one gradient."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_host import LossTerm, Needs, hookimpl
from rlhf_host.backends.torch import TorchBackend
from rlhf_host.config.schema import RoleConfig, TrainConfig
from rlhf_host.errors import RunError
from rlhf_host.plugins.discovery import PluginInfo
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.testing.models import write_tiny_model
from rlhf_host.testing.tensors import make_batch
from rlhf_host.training.batching import deal
from rlhf_host.training.replicas import Replicas, replica_count
from rlhf_host.training.worker import Role, Worker


class Push:
    """Raises every log-probability, some more than others."""

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        yield LossTerm("push", -batch.advantages * outputs.logprobs)


class Faulty:
    @hookimpl
    def compute_loss(self, role, outputs, batch):
        if 3 in batch.task_index.tolist():
            raise ValueError("task 3 is cursed")
        yield LossTerm("push", -outputs.logprobs)


def worker(directory, replicas, plugin):
    model = AutoModelForCausalLM.from_pretrained(directory)
    info = PluginInfo("extension", "made_up", "made-up", "1", ">=1", "ok", "", "m:X", "")
    hooks = PluginManager([Loaded("extension", "p", info, plugin)])
    backend = TorchBackend(TorchBackend.Options(), model=model, role=RoleConfig(lr=1e-2), total_updates=3)
    settings = TrainConfig(replicas=replicas, max_tokens_per_microbatch=60)
    return Worker({"actor": Role("actor", model, backend)}, hooks, settings, Needs()), model


def batch():
    made = make_batch([9, 4, 7, 1, 12, 5, 6, 2], groups=[0, 0, 1, 1, 2, 2, 3, 3], vocabulary=40, seed=1)
    made.advantages = torch.randn(made.action_mask.shape, generator=torch.Generator().manual_seed(2))
    return made


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_three_updates_move_the_weights_as_one_model_does(tmp_path, count, tied):
    directory = write_tiny_model(tmp_path, tied=tied)
    (alone, one), (together, many) = worker(directory, 1, Push()), worker(directory, count, Push())
    start = torch.cat([p.detach().flatten() for p in one.parameters()])
    for step in range(3):
        single, several = alone.update(batch(), first=step == 0), together.update(batch(), first=step == 0)
        expected = single.metrics.result()
        assert several.metrics.result() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    end, other = (torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (one, many))
    assert (end - start).norm() > 0.1
    assert float((end - other).norm() / (end - start).norm()) < 1e-3
    assert torch.allclose(alone.logprobs("actor", batch()), together.logprobs("actor", batch()), atol=1e-4)


def test_replicas_share_storage_and_keep_their_own_gradients(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path))
    team = Replicas(model, 2)
    first, second = (next(replica.parameters()) for replica in team.models)
    assert first.data_ptr() == second.data_ptr()
    second.grad = torch.ones_like(second)
    team.collect()
    assert torch.equal(first.grad, torch.ones_like(first))
    assert second.grad is None


def test_an_error_in_one_replica_stops_the_update_and_leaves_no_gradient(tmp_path):
    cursed, model = worker(write_tiny_model(tmp_path), 2, Faulty())
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RunError, match="task 3 is cursed"):
        cursed.update(batch())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    replicas = cursed._teams["actor"].models
    assert all(p.grad is None for replica in replicas for p in replica.parameters())


def test_a_loss_that_is_not_finite_in_one_replica_refuses_the_whole_update(tmp_path):
    broken, model = worker(write_tiny_model(tmp_path), 2, Push())
    before = [p.clone() for p in model.parameters()]
    poisoned = batch()
    poisoned.advantages[0, 0] = float("inf")
    update = broken.update(poisoned)
    assert "the loss is" in update.refused
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert broken.update(batch()).refused is None


def test_units_are_dealt_out_evenly_and_completely():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(50, 500, (64,), generator=generator).tolist()
    units = [[2 * i, 2 * i + 1] for i in range(64)]
    hands = deal(units, sizes, 5)
    assert sorted(row for hand in hands for unit in hand for row in unit) == list(range(128))
    loads = [sum(sizes[unit[0] // 2] for unit in hand) for hand in hands]
    assert max(loads) / min(loads) < 1.03
    assert deal(units[:2], sizes[:2], 3)[2] == []


def test_how_many(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path))
    assert replica_count(model, 3) == 3
    assert replica_count(model, 0) == torch.get_num_threads()
