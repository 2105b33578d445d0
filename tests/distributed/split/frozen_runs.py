"""Runs of models that are not trained, split over ranks: a part of the program of the processes of ``test_ranks.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rlhf_authoring.tensors import make_batch

from rlhf_host import LossTerm, Needs, Output, RoleNeed, hookimpl
from rlhf_host.config.schema import RoleConfig, TrainConfig
from rlhf_host.distributed.deepspeed.plugin import DeepSpeed
from rlhf_host.distributed.split.ranks import Ranks
from rlhf_host.distributed.split.weight_reader import load_sharded
from rlhf_host.models.loading import load_model
from rlhf_host.plugins.discovery import PluginInfo
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.training.reduction import Denominators
from rlhf_host.training.role import Role
from rlhf_host.training.worker import Worker

TRAIN = TrainConfig(max_tokens_per_microbatch=24)


class Distilled:
    """The policy's mean score under a teacher's distribution over the whole vocabulary."""

    @hookimpl
    def needs(self):
        roles = RoleNeed("actor", trainable=True, source=None), RoleNeed("teacher", source=None)
        return Needs(data="prompts", roles=roles, outputs=(Output("distribution", role="teacher"),))

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        both = outputs.others["teacher"]
        yield LossTerm("distance", -(both.logprobs.exp() * both.own).sum(-1))


def rows() -> Any:
    made = make_batch([9, 4, 7, 1, 40, 5, 6, 2], groups=[0, 0, 0, 1, 1, 2, 2, 2], observations=True, vocabulary=40, seed=1)
    made.advantages = torch.ones(made.action_mask.shape)
    return made


def frozen(
    ranks: Ranks, model: Path, teacher: Path, shards: list[list[int]], dtype: Any, pieces: bool, **zero: Any
) -> dict[str, Any]:
    """Outputs of a teacher, whole and split, for this rank's rows; bytes held of it; and the actor's weights after two updates."""
    settings = RoleConfig(model=str(teacher), device="cpu", dtype=dtype)
    found = load_sharded(settings, trainable=False) if pieces else None
    models: Any = [load_model(settings), load_model(settings) if found is None else found.model]
    plugin = DeepSpeed(DeepSpeed.Options(zero_stage=3, param_persistence_threshold=0, **zero))
    given: Any = {"backend": plugin, "ranks": ranks}
    trained = RoleConfig(model=str(model), device="cpu", lr=1e-3, adam_eps=1e-4)
    weights = load_model(trained, trainable=True)
    actor = Role.of("actor", weights, TRAIN, settings=trained, total_updates=4, **given)
    split = Role.of("teacher", models[1], TRAIN, settings=settings, pieces=found, trainable=False, **given)
    assert split.backend is None
    algorithm = Distilled()
    info = PluginInfo("algo", "distilled", "here", "1", "any", "ok", "", "here:Distilled")
    manager = PluginManager([Loaded("algo", "distilled", info, algorithm)])
    roles = {"actor": actor, "teacher": split, "whole": Role.of("whole", models[0], TRAIN)}
    worker = Worker(roles, manager, TRAIN, algorithm.needs(), ranks)
    batch = rows()
    for number in range(2):  # the ranks change places: their longest rows grow one after the other
        mine = shards[(ranks.rank + number) % len(shards)]
        result = worker.update(batch.select(mine), whole=Denominators.of(batch), rows=mine)
        assert result.refused is None
    assert actor.backend is not None
    after = {name: value.clone() for bucket in actor.backend.weights(4000) for name, value in bucket}
    said = [worker.outputs(name, "logprobs", batch.select(mine)) for name in ("whole", "teacher")]
    held = [sum(getattr(each, "ds_tensor", each).nbytes for each in one.parameters()) for one in models]
    return {"said": said, "held": held, "weights": after}
