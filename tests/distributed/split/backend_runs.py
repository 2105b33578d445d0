"""Short runs of every kind of backend: the program of the processes of ``test_ranks.py``."""

from __future__ import annotations

import gc
import os
import signal
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from rlhf_authoring.contracts.subject import Subject
from rlhf_authoring.contracts.suite import all_checks, run_check
from rlhf_authoring.tensors import make_batch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_host import SEQUENCE_MEAN_TOKEN_MEAN, LossTerm, Metric, Needs, Output, RoleNeed, hookimpl
from rlhf_host import functional as F
from rlhf_host.backends.torch_backend import TorchBackend
from rlhf_host.config.schema import LoraOptions, RoleConfig, TrainConfig
from rlhf_host.distributed.deepspeed import backend as deepspeed_backend
from rlhf_host.distributed.deepspeed.backend import DeepSpeedBackend
from rlhf_host.distributed.deepspeed.plugin import DeepSpeed
from rlhf_host.distributed.split import shards
from rlhf_host.distributed.split.ranks import Ranks
from rlhf_host.distributed.split.shards import saved_bytes
from rlhf_host.distributed.split.weight_reader import load_sharded
from rlhf_host.errors import RunError, UserError
from rlhf_host.models.loading import load_model
from rlhf_host.plugins.discovery import PluginInfo
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.protocols import BackendTraits
from rlhf_host.training.reduction import Denominators, Metrics
from rlhf_host.training.role import Role
from rlhf_host.training.worker import Worker

sys.path.append(str(Path(__file__).parent))
from frozen_runs import frozen  # noqa: F401  # a function of the program
from group import serve

KINDS = {
    "torch": None,
    "zero-0": {"zero_stage": 0},
    "zero-1": {"zero_stage": 1},
    "zero-2": {"zero_stage": 2},
    "zero-2-offload": {"zero_stage": 2, "offload_optimizer": "cpu"},
    "zero-2-overlap": {"zero_stage": 2, "extra": {"zero_optimization": {"overlap_comm": True}}},
    "zero-3": {"zero_stage": 3, "param_persistence_threshold": 0},
    "zero-3-persistent": {"zero_stage": 3, "param_persistence_threshold": 2000},
    "zero-3-offload": {
        "zero_stage": 3,
        "param_persistence_threshold": 0,
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
    },
    "zero-3-two-copies": {"zero_stage": 3, "param_persistence_threshold": 0, "zero_hpz_partition_size": 2},
    "zero-3-adam": {"zero_stage": 3, "param_persistence_threshold": 0, "optimizer": "deepspeed"},
    "zero-2-offload-adam": {"zero_stage": 2, "offload_optimizer": "cpu", "optimizer": "deepspeed"},
    "zero-3-offload-adam": {
        "zero_stage": 3,
        "param_persistence_threshold": 0,
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
        "optimizer": "deepspeed",
    },
}
SHORT = {
    "zero-1-bf16": {"zero_stage": 1, "precision": "bf16"},
    "zero-2-bf16": {"zero_stage": 2, "precision": "bf16"},
    "zero-2-bf16-offload": {"zero_stage": 2, "precision": "bf16", "offload_optimizer": "cpu"},
    "zero-2-bf16-offload-adam": {
        "zero_stage": 2,
        "precision": "bf16",
        "offload_optimizer": "cpu",
        "optimizer": "deepspeed",
    },
    "zero-3-bf16": {"zero_stage": 3, "precision": "bf16", "param_persistence_threshold": 0},
}
"""Weights of 16 bits in passes, with an fp32 copy in the optimizer."""
TURNS = {
    "zero-2-optimizer-away": {"zero_stage": 2, "offload_while_sampling": "optimizer"},
    "zero-3-optimizer-away": {"zero_stage": 3, "param_persistence_threshold": 0, "offload_while_sampling": "optimizer"},
}
"""The weights stay while engines sample."""
SPLIT = {"zero-1-split": {"zero_stage": 1, "autotp_size": 2}, "zero-2-split": {"zero_stage": 2, "autotp_size": 2}}
RECOMPUTED = " recomputed"
"""Ends the name of a kind with gradient checkpointing."""
PIECES = " pieces"
"""Ends the name of a kind whose weights are read block by block."""
WHOLE = [[0, 1, 2, 3, 4, 5, 6, 7]]
SHARDS = {"uneven": [[0, 1, 2, 3, 4, 6], [5, 7]], "one empty": [WHOLE[0], []]}


class Plugin:
    """Policy gradient with an entropy bonus and a critic, both weighed by a statistic over all ranks."""

    @hookimpl
    def needs(self):
        critic = RoleNeed("critic", head="scalar", trainable=True)
        return Needs(roles=(RoleNeed("actor", trainable=True, source=None), critic))

    @hookimpl
    def batch_statistics(self, role, outputs, batch):
        found = outputs.values if role == "critic" else outputs.logprobs
        if found is not None:
            yield Metric("level", found, batch.loss_mask)

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        if 99 in batch.task_index.tolist():
            raise ValueError("task 99 is cursed")
        if 98 in batch.task_index.tolist():
            yield LossTerm("steep", (outputs.logprobs * 0.0).abs().sqrt())  # 0, with a gradient that is not finite
        if role == "critic":
            yield LossTerm("value", (outputs.values - batch.returns) ** 2, aggregation=SEQUENCE_MEAN_TOKEN_MEAN)
        else:
            yield from F.policy_loss(outputs, batch, F.PolicyLossOptions())
            yield LossTerm("entropy", -outputs.entropy * abs(batch.stats["level"]), coefficient=0.1)
        yield Metric("rows", float(len(batch)), reduce="sum")


def manager() -> PluginManager:
    info = PluginInfo("extension", "made_up", "made-up", "1", ">=1", "ok", "", "m:X", "")
    return PluginManager([Loaded("extension", "p", info, Plugin())])


def batch(bad: str | None = None) -> Any:
    """Eight rows of 1 to 12 tokens; ``bad`` spoils row 5, which the second rank has in uneven shards."""
    made = make_batch([9, 4, 7, 1, 12, 5, 6, 2], groups=[0, 0, 0, 1, 1, 2, 2, 2], observations=True, vocabulary=40, seed=1)
    generator = torch.Generator().manual_seed(2)
    made.advantages = torch.randn(made.action_mask.shape, generator=generator)
    made.returns = torch.randn(made.action_mask.shape, generator=generator)
    made.old_logprobs = made.sampler_logprobs * 0.9
    made.loss_mask[3] = False
    if bad == "plugin":
        made.task_index[5] = 99
    elif bad == "gradient":
        made.task_index[5] = 98
    elif bad == "loss":
        made.advantages[5, 0] = float("inf")
    return made


TRAIN = TrainConfig(max_tokens_per_microbatch=24)


class TorchWatched(TorchBackend):
    gradients: list[torch.Tensor]

    def _sum_gradients(self) -> None:
        super()._sum_gradients()
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.parameters]))


class ZeroWatched(DeepSpeedBackend):
    gradients: list[torch.Tensor]

    def step(self):
        from deepspeed.utils import safe_get_full_grad

        whole = {0: lambda p: p.grad, 3: lambda p: self.engine.optimizer.get_fp32_grad_for_param(p)}
        found = [whole.get(self.options.zero_stage, safe_get_full_grad)(p).clone() for p in self.parameters]
        if self.options.autotp_size > 1:
            found = self._joined(found)
        self.gradients.append(torch.cat([gradient.flatten() for gradient in found]))
        return super().step()

    def _joined(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients in the weights' places, joined as those are."""
        kept = [p.data for p in self.parameters]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.data = gradient
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        found = {name: value for bucket in self.weights(2**20) for name, value in bucket}
        for parameter, data in zip(self.parameters, kept, strict=True):
            parameter.data = data
        return [found[name] for name in names]

    def copies(self) -> torch.Tensor:
        """The optimizer's fp32 copy of all weights."""
        from deepspeed.utils import safe_get_full_fp32_param

        return torch.cat([safe_get_full_fp32_param(p).flatten().clone() for p in self.parameters])


PARTLY = {
    " frozen": {"freeze": ["*embed_tokens*", "*layers.0*"]},
    " lora": {"lora": LoraOptions(rank=4)},
}
"""Ends the name of a kind in which not all weights are trained → settings of its roles."""


def role_of(name: str, model: Path, ranks: Ranks, kind: str) -> Role:
    in_pieces = kind.endswith(PIECES)
    kind = kind.removesuffix(PIECES)
    partly = next((ending for ending in PARTLY if kind.endswith(ending)), "")
    kind = kind.removesuffix(partly)
    settings = RoleConfig(
        **PARTLY.get(partly, {}),
        model=str(model),
        device="cpu",
        lr=1e-4,
        adam_eps=1e-4,
        weight_decay=0.01,
        max_grad_norm=0.01,
        warmup_steps=2,
        gradient_checkpointing=kind.endswith(RECOMPUTED),
    )
    kind = kind.removesuffix(RECOMPUTED)
    head: Any = "scalar" if name == "critic" else "lm"
    found = load_sharded(settings, head=head) if in_pieces else None
    loaded = load_model(settings, head=head, trainable=True) if found is None else found.model
    if name == "critic":
        score = torch.empty_like(loaded.score.weight, device="cpu").normal_(generator=torch.Generator().manual_seed(3))
        if found is None:
            loaded.score.weight.data.copy_(score)
        else:
            found = replace(found, weights=partial(with_head, found.weights, score))
    if kind == "torch":
        plugin = SimpleNamespace(traits=BackendTraits(), start=TorchWatched)
    else:
        zero = DeepSpeed(DeepSpeed.Options(**(KINDS | SHORT | TURNS | SPLIT)[kind]))
        plugin = SimpleNamespace(traits=zero.traits, start=partial(ZeroWatched, zero))
    role = Role.of(name, loaded, TRAIN, backend=plugin, settings=settings, total_updates=10, ranks=ranks, pieces=found)
    role.backend.gradients = []
    return role


def with_head(weights: Any, score: torch.Tensor) -> Any:
    for bucket in weights():
        yield [(name, score if name == "score.weight" else tensor) for name, tensor in bucket]


def worker_of(model: Path, ranks: Ranks, kind: str) -> Worker:
    roles = {name: role_of(name, model, ranks, kind) for name in ("actor", "critic")}
    needs = Needs(outputs=(Output("values"), Output("entropy")))
    return Worker(roles, manager(), TRAIN, needs, ranks)


def weights_of(worker: Worker) -> dict[str, dict[str, torch.Tensor]]:
    """Every role's whole weights, on rank 0."""
    found = {name: role.backend.weights(4000) for name, role in worker.roles.items()}
    return {name: {key: value.clone() for bucket in found[name] for key, value in bucket} for name in found}


def update(worker: Worker, data: Any, shards: list[list[int]]) -> tuple[dict[str, float], str | None]:
    """One optimizer batch; metrics joined over processes."""
    mine = shards[worker.ranks.rank]
    result = worker.update(data.select(mine), whole=Denominators.of(data), rows=mine)
    whole = Metrics()
    for share in worker.ranks.gather(result.metrics):
        whole.join(share)
    return whole.result(), result.refused


def train(ranks: Ranks, model: Path, kind: str, shards: list[list[int]], updates: int = 3) -> dict[str, Any]:
    """Updates of the same batch, and the weights before and after each."""
    worker = worker_of(model, ranks, kind)
    weights, metrics = [weights_of(worker)], []
    for _ in range(updates):
        metrics.append(update(worker, batch(), shards)[0])
        weights.append(weights_of(worker))
    return {"weights": weights, "metrics": metrics, "gradients": gradients_of(worker)}


def gradients_of(worker: Worker) -> dict[str, torch.Tensor]:
    """Of every role's updates, joined."""
    return {name: torch.stack(role.backend.gradients) for name, role in worker.roles.items()}


def live(ranks: Ranks, model: Path, kind: str, directory: Path) -> dict[str, Any]:
    """Batches that fail on one rank, each in another way; three updates, saved after the second; and again the third, resumed."""
    worker, shards = worker_of(model, ranks, kind), SHARDS["uneven"]
    said, weights = [], [weights_of(worker)]
    for bad in ("plugin", "loss", "gradient"):
        try:
            said.append(update(worker, batch(bad), shards)[1])
        except RunError as failure:
            said.append(str(failure))
    after_failures = weights_of(worker)
    for role in worker.roles.values():
        role.backend.gradients.clear()
    actor = worker.roles["actor"].backend
    copies = actor.copies() if kind in SHORT else torch.zeros(())
    metrics = []
    for number in range(3):
        if number == 2:
            write(worker, directory)
        metrics.append(update(worker, batch(), shards)[0])
        weights.append(weights_of(worker))
    return {
        "said": said,
        "after_failures": after_failures,
        "updates": actor.updates,
        "weights": weights,
        "metrics": metrics,
        "gradients": gradients_of(worker),
        "change": actor.copies() - copies if kind in SHORT else None,
        "dtypes": {value.dtype for bucket in actor.weights(2**20) for _, value in bucket},
        "resumed": go_on(ranks, model, kind, directory),
    }


def take_turns(ranks: Ranks, model: Path, kind: str, directory: Path, *, moves: bool) -> dict[str, Any]:
    """Weights after each of three updates, and before it, when they are also saved: with everything moved away, and moved back
    afterwards, or with everything in its place.
    """
    worker = worker_of(model, ranks, kind)
    backends = [role.backend for role in worker.roles.values()]
    after, away, parked = [], [], []
    sizes: dict[bool, dict[int, int]] = {}  # of buffers, before there are averages and with them: made once
    for number in range(3):
        for backend in backends if moves else []:
            backend.__class__ = Moved
            backend.offload()
            parked.append(parked_numbers(backend))
            for call in (
                partial(backend.run_pass, dict),
                partial(DeepSpeedBackend.step, backend),
                backend.discard,
                partial(backend.load, directory),
            ):
                with pytest.raises(RunError, match="away from its device"):
                    call()
        away.append(weights_of(worker))
        write(worker, directory / str(number))
        for backend in backends if moves else []:
            assert backend._parking, "a copy leaves things as they were"
            buffers = backend._parking.held_bytes
            backend.reload()
            assert not backend._parking
            assert backend._parking.held_bytes == buffers == sizes.setdefault(number > 0, {}).setdefault(id(backend), buffers)
        update(worker, batch(), SHARDS["uneven"])
        after.append(weights_of(worker))
    return {"after": after, "away": away, "parked": parked}


def parked_numbers(backend: DeepSpeedBackend) -> dict[str, bool]:
    """Returns, for weights and for the optimizer's averages, True if none that this process holds has memory."""
    optimizer = getattr(backend.engine.optimizer, "optimizer", backend.engine.optimizer)
    values = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    held = [value for p in backend.parameters for value in (p, getattr(p, "ds_tensor", p))]
    empty = {"weights": held, "averages": [value for value in values if value.dim()]}
    return {name: all(not value.untyped_storage().nbytes() for value in values) for name, values in empty.items()}


def contract(ranks: Ranks, name: str, options: dict[str, Any]) -> str:
    """Returns the message of the contract's check of saving while things are away; they move though this is a CPU."""
    (check,) = [check for check in all_checks(("backend",)) if check.name == "what_is_away_is_saved_as_it_is"]
    with mock.patch.object(DeepSpeedBackend, "_stays", False):
        result = run_check(check, Subject("backend", name, options))
    return result.message if result.passed is not True else "passed"


class Moved(ZeroWatched):
    """Moves though it is on a CPU, where there is nowhere else to go."""

    _stays = False


def second_copies(ranks: Ranks, model: Path, kind: str) -> list[int]:
    """Elements that this rank keeps of every weight's second copy."""
    role = role_of("actor", model, ranks, kind)
    role.passes.model(torch.zeros(1, 1, dtype=torch.int64))
    return [p.ds_secondary_tensor.numel() for p in role.passes.model.parameters()]


def begin(ranks: Ranks, model: Path, kind: str, directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Weights after three updates, saved after the second."""
    worker = worker_of(model, ranks, kind)
    shards = SHARDS["uneven"] if ranks.size == 2 else WHOLE
    for _ in range(2):
        update(worker, batch(), shards)
    write(worker, directory)
    update(worker, batch(), shards)
    return weights_of(worker)


def write(worker: Worker, directory: Path) -> None:
    """What a checkpoint holds of every role."""
    for name, role in worker.roles.items():
        if (worker.ranks.rank, worker.ranks.part) == (0, 0):
            (directory / name).mkdir(parents=True)
        worker.ranks.gather(None)
        for writer in (role.backend.save(directory / name), role.backend.save_model(directory / f"{name}-model")):
            if writer is not None:
                writer()


def go_on(ranks: Ranks, model: Path, kind: str, directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Weights after the third update, made by a worker that starts from what was saved."""
    worker = worker_of(model, ranks, kind)
    for name, role in worker.roles.items():
        if kind == "torch":
            saved = RoleConfig(model=str(directory / f"{name}-model"), device="cpu")
            role.passes.model.load_state_dict(load_model(saved, head=HEADS[name]).state_dict())
        role.backend.load(directory / name)
    update(worker, batch(), SHARDS["uneven"] if ranks.size == 2 else WHOLE)
    return weights_of(worker)


def layer(ranks: Ranks, model: Path, kind: str) -> tuple[int, ...]:
    """What this process has of a matrix."""
    return tuple(role_of("actor", model, ranks, kind).passes.model.model.layers[0].mlp.up_proj.weight.shape)


def refusal(ranks: Ranks, model: Path, kind: str, directory: Path) -> str:
    try:
        role_of("actor", model, ranks, kind).backend.load(directory / "actor")
    except UserError as error:
        return str(error)
    return "loaded"


HEADS = {"actor": "lm", "critic": "scalar"}


def save(ranks: Ranks, model: Path, kind: str, directory: Path) -> dict[str, torch.Tensor]:
    """The gathered weights of a model that is also written."""
    role = role_of("actor", model, ranks, kind)
    if (writer := role.backend.save_model(directory)) is not None:
        writer()
    return {name: value.clone() for bucket in role.backend.weights(4000) for name, value in bucket}


class Kept(TorchDispatchMode):
    """Counts the bytes that are alive of what is made meanwhile, and the most."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        held = [value for p in model.parameters() for value in (p.data, getattr(p, "ds_tensor", p))]
        self.before = {value.untyped_storage().data_ptr() for value in held}
        self.made: list[weakref.ref] = []
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.made.append(weakref.ref(result))
        self.most = max(self.most, self.alive)
        return result

    @property
    def alive(self) -> int:
        storages = [each.untyped_storage() for made in self.made if (each := made()) is not None]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(size for place, size in sizes.items() if place not in self.before)


def share(ranks: Ranks, model: Path, kind: str, directory: Path) -> dict[str, int]:
    """Bytes of weights that this process keeps until they are written, the most meanwhile, and those of the whole model."""
    backend = role_of("actor", model, ranks, kind).backend
    sizes = saved_bytes(backend.model)
    with mock.patch.object(deepspeed_backend, "COPIED_BYTES", 20_000), Kept(backend.model) as kept:
        writer = backend.save_model(directory)
    writer()
    gc.collect()
    before = kept.alive
    del writer
    gc.collect()
    held = before - kept.alive  # the writer's, without other small tensors that were made meanwhile
    return {"held": held, "most": kept.most, "whole": sum(sizes.values()), "largest": max(sizes.values())}


def cut_off(ranks: Ranks, model: Path, kind: str, directory: Path) -> None:
    """Writes a model, but the writer of rank 1 is killed when half of its file is there."""
    writer = role_of("actor", model, ranks, kind).backend.save_model(directory)
    if ranks.rank == 0:
        writer()
    elif child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    else:
        with mock.patch.object(shards, "save_file", half_a_file):
            writer()


def half_a_file(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    whole = safetensors.torch.save(tensors, metadata)
    path.write_bytes(whole[: len(whole) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def buckets(ranks: Ranks, model: Path, kind: str, bucket_bytes: int) -> list[list[tuple[str, int]]]:
    role = role_of("actor", model, ranks, kind)
    return [[(name, value.nbytes) for name, value in bucket] for bucket in role.backend.weights(bucket_bytes)]


def infer(ranks: Ranks, model: Path, kind: str, shards: list[list[int]]) -> dict[str, torch.Tensor]:
    """Before and after an update, so that passes without gradient follow those with."""
    worker = worker_of(model, ranks, kind)
    mine = shards[ranks.rank]
    first = worker.outputs("actor", "logprobs", batch().select(mine))
    update(worker, batch(), shards)
    shard = batch().select(mine)
    return {
        "rows": mine,
        "before": first,
        "after": worker.outputs("actor", "logprobs", shard),
        "values": worker.outputs("critic", "values", shard),
        "scores": worker.outputs("critic", "scores", shard),
    }


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]), functions=globals())
