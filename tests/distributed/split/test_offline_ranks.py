"""Training on a data set takes the same steps on one rank and on two, with PyTorch and ZeRO, statistics and scalar heads included.

As in ``test_ranks.py``, two processes are started once; this file is their program.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlhf_plugin_dpo import DPO
from rlhf_plugin_kto import KTO
from rlhf_plugin_reward_model_training import RewardModel
from rlhf_rows.batches import Batches
from rlhf_rows.source import group_of
from rlhf_rows.units import Row, Unit

from rlhf_host.backends.one_process import OneProcess
from rlhf_host.backends.torch_backend import TorchBackend
from rlhf_host.config.schema import RoleConfig, TrainConfig
from rlhf_host.distributed.deepspeed.plugin import DeepSpeed
from rlhf_host.distributed.ray.batch_shards import deal_rows
from rlhf_host.distributed.split.ranks import Ranks
from rlhf_host.models.loading import load_model
from rlhf_host.plugins.discovery import PluginInfo
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.protocols import BackendTraits
from rlhf_host.records.episodes import Task
from rlhf_host.records.needs import AlgoNeeds
from rlhf_host.training.reduction import Denominators, Metrics
from rlhf_host.training.role import Role
from rlhf_host.training.worker import Worker

sys.path.append(str(Path(__file__).parent))
from group import Group, serve

ALGORITHMS = {"dpo": DPO, "kto": KTO, "rm": RewardModel}
KINDS = {
    "torch": None,
    "zero-2": {"zero_stage": 2},
    "zero-3": {"zero_stage": 3, "param_persistence_threshold": 0},
}
TRAIN = TrainConfig(max_tokens_per_microbatch=48)


def units(algo: str) -> list[Unit]:
    """Ragged pairs, or rows; an odd number, so that ranks get unequal shares."""
    draw = torch.Generator().manual_seed(5)

    def ids(low: int, high: int) -> list[int]:
        return torch.randint(3, 40, (int(torch.randint(low, high, (), generator=draw)),), generator=draw).tolist()

    def row(prompt: list[int], label: float) -> Row:
        completion = ids(2, 9)
        return Row(prompt, completion, [(0, len(completion))], {"label": label})

    if algo == "kto":
        return [Unit((row(ids(2, 6), float(number % 4 > 0)),)) for number in range(7)]
    return [Unit((row(prompt, 1.0), row(prompt, 0.0))) for prompt in (ids(2, 6) for _ in range(5))]


def train(ranks: Ranks, model: Path, algo: str, kind: str) -> dict[str, Any]:
    """Three updates of one batch: metrics joined over ranks, and the weights afterwards."""
    plugin = ALGORITHMS[algo](ALGORITHMS[algo].Options())
    info = PluginInfo("algo", algo, "made-up", "1", ">=1", "ok", "", "m:X", "")
    manager = PluginManager([Loaded("algo", algo, info, plugin)])
    (needs,) = (own for _, own in manager.each("needs"))
    settings = RoleConfig(model=str(model), device="cpu", lr=3e-3, adam_eps=1e-4)
    if KINDS[kind] is None:
        backend = SimpleNamespace(traits=BackendTraits(), start=TorchBackend)
    else:
        backend = DeepSpeed(DeepSpeed.Options(**KINDS[kind]))
    roles = {}
    for need in needs.roles:
        loaded = load_model(settings, head=need.head, trainable=need.trainable)
        if need.name == "reference":  # else margins are rounding errors at first, whose signs would be compared
            loaded.get_output_embeddings().weight.data *= 1.2
        training = {"backend": backend, "settings": settings, "total_updates": 10, "ranks": ranks} if need.trainable else {}
        roles[need.name] = Role.of(need.name, loaded, TRAIN, **training)
    worker = Worker(roles, manager, TRAIN, needs, ranks)
    groups = [group_of(unit, Task("", index=number, source="made-up"), 0, str) for number, unit in enumerate(units(algo))]
    whole = Batches(manager, needs).rows(groups, step=1)
    if "reference" in roles:
        whole.logprobs["reference"] = worker.outputs("reference", "logprobs", whole)
    mine = deal_rows(whole, ranks.size, unit_rows=AlgoNeeds.of(needs).unit_rows)[ranks.rank]
    metrics = []
    for _ in range(3):
        shares = [worker.update(whole.batch().select(mine), sampled_now=False, whole=Denominators.of(whole), rows=mine)]
        shares.append(
            SimpleNamespace(metrics=worker.evaluate(whole.batch().select(mine), whole=Denominators.of(whole), rows=mine))
        )
        joined = []
        for share in shares:
            total = Metrics()
            for each in ranks.gather(share.metrics):
                total.join(each)
            joined.append(total.result())
        metrics.append(joined)
    weights = {name: value.clone() for bucket in worker.roles["actor"].backend.weights(4000) for name, value in bucket}
    return {"metrics": metrics, "weights": weights, "rows": mine}


@pytest.fixture(scope="module")
def pair(fork, environment, tmp_path_factory):
    group = Group(fork, environment, tmp_path_factory.mktemp("ranks"), 2, 1, __file__)
    yield group
    group.close()


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_two_ranks_take_the_steps_of_one(pair, tiny_model, algo):
    alone = train(OneProcess(), tiny_model, algo, "torch")
    losses = [update["loss"] for update, _ in alone["metrics"]]
    assert losses[0] - losses[-1] > 1e-3, "nothing was learnt, so nothing is compared"
    if algo == "kto":
        assert alone["metrics"][-1][0]["kl"] > 1e-4
    for kind in KINDS:
        first, second = pair(train, tiny_model, algo, kind)
        assert first["rows"]
        assert second["rows"]
        for here, there in zip(first["metrics"], alone["metrics"], strict=True):
            assert here == [pytest.approx(values, abs=1e-5, rel=1e-4) for values in there], kind
        for name, value in alone["weights"].items():
            assert torch.allclose(first["weights"][name], value, atol=1e-5), (kind, name)


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]), functions={"train": train})
