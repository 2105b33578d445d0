"""One optimizer batch has one gradient, on one rank or two, however it is sharded and whatever ZeRO spreads.

Two processes are started once and serve every test: this file, run as a script, is their program. What all tests of one kind of
backend look at is computed once for the kind (``life``).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import pickle
import shutil
import socket
import subprocess
import sys
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlhf_authoring.models import write_tiny_model
from rlhf_authoring.tensors import make_batch
from transformers import AutoModelForCausalLM

from rlhf_host import SEQUENCE_MEAN_TOKEN_MEAN, LossTerm, Metric, Needs, Output, RoleNeed, hookimpl
from rlhf_host import functional as F
from rlhf_host.backends.deepspeed import DeepSpeed
from rlhf_host.backends.deepspeed_backend import DeepSpeedBackend
from rlhf_host.backends.ranks import Ranks
from rlhf_host.backends.torch_backend import TorchBackend
from rlhf_host.config.schema import RoleConfig, TrainConfig
from rlhf_host.errors import RunError, UserError
from rlhf_host.models.loading import load_model
from rlhf_host.plugins.discovery import PluginInfo
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.protocols import BackendTraits
from rlhf_host.training.reduction import Denominators, Metrics
from rlhf_host.training.role import Role
from rlhf_host.training.worker import Worker

KINDS = {
    "torch": None,
    "zero-0": {"zero_stage": 0},
    "zero-1": {"zero_stage": 1},
    "zero-2": {"zero_stage": 2},
    "zero-2-offload": {"zero_stage": 2, "offload_optimizer": "cpu"},
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
SPLIT = {"zero-1-split": {"zero_stage": 1, "autotp_size": 2}, "zero-2-split": {"zero_stage": 2, "autotp_size": 2}}
RECOMPUTED = " recomputed"
"""Ends the name of a kind with gradient checkpointing."""
WHOLE = [[0, 1, 2, 3, 4, 5, 6, 7]]
SHARDS = {"uneven": [[0, 1, 2, 3, 4, 6], [5, 7]], "one empty": [WHOLE[0], []]}


# --- what is trained, in every process ----------------------------------------------------------


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


def role_of(name: str, model: Path, ranks: Ranks, kind: str) -> Role:
    settings = RoleConfig(
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
    loaded = load_model(settings, head="scalar" if name == "critic" else "lm", trainable=True)
    if name == "critic":
        loaded.score.weight.data.normal_(generator=torch.Generator().manual_seed(3))
    if kind == "torch":
        plugin = SimpleNamespace(traits=BackendTraits(), start=TorchWatched)
    else:
        zero = DeepSpeed(DeepSpeed.Options(**(KINDS | SHORT | SPLIT)[kind]))
        plugin = SimpleNamespace(traits=zero.traits, start=partial(ZeroWatched, zero))
    role = Role.of(name, loaded, TRAIN, backend=plugin, settings=settings, total_updates=10, ranks=ranks)
    role.backend.gradients = []
    return role


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


def take_turns(ranks: Ranks, model: Path, kind: str) -> dict[str, dict[str, torch.Tensor]]:
    """Weights after three updates, with everything moved away and back before each."""
    worker = worker_of(model, ranks, kind)
    for role in worker.roles.values():
        role.backend.__class__ = Moved
    for _ in range(3):
        for role in worker.roles.values():
            role.backend.offload()
            assert role.backend.engine.optimizer.offloaded_states
            role.backend.reload()
            assert not role.backend.engine.optimizer.offloaded_states
        update(worker, batch(), SHARDS["uneven"])
    return weights_of(worker)


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


# --- the harness --------------------------------------------------------------------------------


class Group:
    """Ranks that run a program's functions: ``group(function, ...)`` gives what each returned."""

    def __init__(
        self, fork: Any, environment: dict[str, str], directory: Path, size: int, parts: int = 1, program: str = __file__
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.logs = [directory / f"rank-{rank}.log" for rank in range(size)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            arguments = [str(part) for part in (rank, size, port, parts)]
            with log.open("wb") as errors:
                self.processes.append(fork(arguments, environment, program=program, stderr=errors, text=False))

    def __call__(self, function: Any, *arguments: Any) -> list[Any]:
        for process in self.processes:
            pickle.dump((function.__name__, arguments), process.stdin)
            process.stdin.flush()
        answers = []
        for process, log in zip(self.processes, self.logs, strict=True):
            try:
                ok, answer = pickle.load(process.stdout)
            except EOFError:
                pytest.fail(f"a rank ended:\n{log.read_text()[-3000:]}")
            answers.append((ok, answer))
        failed = [f"rank {rank}: {answer}" for rank, (ok, answer) in enumerate(answers) if not ok]
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def serve(rank: int, size: int, port: int, parts: int, functions: dict[str, Any]) -> None:
    import cpuinfo

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # a process of its own, for every Adam of DeepSpeed
    answers = sys.stdout.buffer
    gc.freeze()  # DeepSpeed searches for garbage at every turn: not among all that was imported
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        ranks = Ranks.join(rank, size, "127.0.0.1", port, parts=parts, timeout_s=60.0)
        with contextlib.suppress(EOFError):
            while True:
                name, arguments = pickle.load(sys.stdin.buffer)
                try:
                    answer = (True, functions[name](ranks, *arguments))
                except Exception:
                    answer = (False, traceback.format_exc())
                pickle.dump(answer, answers)
                answers.flush()


@pytest.fixture(scope="module")
def group(fork, environment, tmp_path_factory):
    """``group(size, parts)`` starts so many processes."""
    groups = []

    def start(size: int, parts: int = 1) -> Group:
        groups.append(Group(fork, environment, tmp_path_factory.mktemp("ranks"), size, parts))
        return groups[-1]

    yield start
    for each in groups:
        each.close()


@pytest.fixture(scope="module")
def pair(group):
    return group(2)


@pytest.fixture(scope="module")
def single(group):
    return group(1)


@dataclass
class Life:
    """What ``live`` gave of both ranks, and where the checkpoint is."""

    first: dict[str, Any]
    second: dict[str, Any]
    directory: Path


@pytest.fixture(scope="module")
def life(pair, tiny_model, tmp_path_factory):
    """``life(kind)``: the same for all tests of the kind."""
    lives: dict[str, Life] = {}

    def of(kind: str) -> Life:
        if kind not in lives:
            directory = tmp_path_factory.mktemp(kind)
            lives[kind] = Life(*pair(live, tiny_model, kind, directory), directory)
        return lives[kind]

    return of


@pytest.fixture(scope="module")
def alone(tiny_model):
    """One rank, plain PyTorch: what all others are compared with."""
    return train(Ranks(), tiny_model, "torch", WHOLE)


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def change(run: dict[str, Any], role: str, updates: int = 3) -> torch.Tensor:
    before, after = run["weights"][0][role], run["weights"][updates][role]
    return torch.cat([(after[name] - before[name]).flatten() for name in sorted(before)])


# --- the same gradient --------------------------------------------------------------------------


def check_steps(run, other, alone, updates=3):
    """Both ranks took the steps of one process."""
    for role in ("actor", "critic"):
        expected = alone["gradients"][role][:updates]
        assert all(gradient.norm() > 0.01 for gradient in expected), "clipped at every step"
        for found in (run, other):
            assert gap(found["gradients"][role], expected) < 1e-5
        assert run["weights"][0][role].keys() == alone["weights"][0][role].keys()
        assert gap(change(run, role, updates), change(alone, role, updates)) < 1e-3
    for found in (run, other):
        assert found["metrics"] == [pytest.approx(metrics, rel=1e-4, abs=1e-5) for metrics in alone["metrics"][:updates]]


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_the_gradient_and_take_the_steps_of_one(life, alone, kind):
    check_steps(life(kind).first, life(kind).second, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_rows_takes_the_steps_too(pair, alone, tiny_model, kind):
    check_steps(*pair(train, tiny_model, kind, SHARDS["one empty"], 2), alone, updates=2)


@pytest.mark.parametrize("kind", ["zero-2", "zero-3"])
def test_one_rank_alone_needs_no_group(single, alone, tiny_model, kind):
    (found,) = single(train, tiny_model, kind, WHOLE, 2)
    check_steps(found, found, alone, updates=2)


def test_metrics_name_every_row_and_both_roles_once(alone):
    metrics = alone["metrics"][0]
    assert (metrics["rows"], metrics["critic/rows"]) == (8.0, 8.0)
    assert {"grad_norm", "critic/grad_norm", "loss/entropy", "critic/loss/value", "ratio/max_log"} <= metrics.keys()
    assert metrics["lr"] == pytest.approx(0.5e-4), "half-way through the warm-up"


@pytest.mark.parametrize("kind", ["zero-2", "zero-3"])
def test_tied_embeddings_have_one_gradient(pair, tmp_path, kind):
    model = write_tiny_model(tmp_path / "tied", tied=True)
    expected = train(Ranks(), model, "torch", WHOLE, 2)
    found, _ = pair(train, model, kind, SHARDS["uneven"], 2)
    assert gap(found["gradients"]["actor"], expected["gradients"]["actor"]) < 1e-5
    assert gap(change(found, "actor", 2), change(expected, "actor", 2)) < 1e-3


@pytest.mark.parametrize("kind", ["torch", "zero-2", "zero-3"])
def test_passes_without_gradient_take_shards_of_any_size(pair, tiny_model, kind):
    expected = infer(Ranks(), tiny_model, "torch", WHOLE)
    for name in ("before", "after", "values", "scores"):
        for found in pair(infer, tiny_model, kind, SHARDS["one empty"]):
            wanted = expected[name][found["rows"]]
            assert found[name].shape[0] == len(found["rows"])
            if len(found["rows"]):
                assert torch.allclose(found[name], wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["torch", "zero-1", "zero-2", "zero-3"])
def test_recomputing_layers_in_the_backward_pass_changes_nothing(pair, alone, tiny_model, kind):
    check_steps(*pair(train, tiny_model, kind + RECOMPUTED, SHARDS["uneven"], 2), alone, updates=2)


@pytest.mark.parametrize("kind", SHORT)
def test_weights_of_16_bits_are_trained_by_their_fp32_copies(life, alone, tiny_model, kind):
    expected = torch.cat([value.flatten() for value in alone_change(alone, tiny_model)])
    found, other = life(kind).first, life(kind).second
    assert found["dtypes"] == {torch.bfloat16}
    assert gap(found["gradients"]["actor"].float(), alone["gradients"]["actor"]) < 3e-2
    assert gap(found["change"], expected) < 5e-2
    assert torch.equal(found["change"], other["change"])


@pytest.mark.parametrize("kind", ["zero-1", "zero-2-bf16", "zero-2-offload-adam", "zero-3"])
def test_what_moves_away_between_phases_comes_back_as_it_was(pair, life, tiny_model, kind):
    expected = life(kind).first["weights"][3]
    found, _ = pair(take_turns, tiny_model, kind)
    for role in expected:
        assert all(torch.equal(found[role][name], expected[role][name]) for name in expected[role])


def test_the_second_copy_of_zero_plus_plus_is_spread_over_as_many_ranks_as_asked(pair, tiny_model):
    sizes = [value.numel() for value in AutoModelForCausalLM.from_pretrained(tiny_model).parameters()]
    assert pair(second_copies, tiny_model, "zero-3-two-copies") == [[-(-size // 2) for size in sizes]] * 2


# --- layers split over processes ----------------------------------------------------------------


@pytest.fixture(scope="module")
def halves(group):
    """Four processes: two ranks, each of two processes that have half of every layer."""
    return group(4, parts=2)


@pytest.fixture(scope="module")
def split_lives(halves, tiny_model, tmp_path_factory):
    return halves(live, tiny_model, "zero-1-split", tmp_path_factory.mktemp("split"))


def test_two_ranks_of_split_layers_have_the_gradient_and_take_the_steps_of_one(halves, split_lives, alone, tiny_model):
    assert halves(layer, tiny_model, "zero-1-split") == [(32, 32)] * 4, "half of 64 rows"
    for found in split_lives:
        check_steps(found, found, alone)


def test_a_rank_of_split_layers_without_rows_takes_the_steps_too(halves, alone, tiny_model):
    assert halves(layer, tiny_model, "zero-2-split") == [(32, 32)] * 4
    for found in halves(train, tiny_model, "zero-2-split", SHARDS["one empty"], 2):
        check_steps(found, found, alone, updates=2)


def test_split_layers_fail_on_all_processes_and_leave_no_trace(split_lives):
    for found in split_lives:
        assert [said.split(":")[0] for said in found["said"]] == ["extension", "actor", "actor"]
        check_untouched(found)


def test_split_layers_come_out_whole(halves, tiny_model, tmp_path):
    found = halves(save, tiny_model, "zero-1-split", tmp_path / "saved")[0]
    expected = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value)
        assert torch.equal(written[name], value)


def test_split_layers_resume_bit_for_bit(split_lives):
    check_same(split_lives[0]["resumed"], split_lives[0]["weights"][3])


def alone_change(alone: dict[str, Any], model: Path) -> list[torch.Tensor]:
    """The actor's change in the order of its parameters."""
    names = [name for name, _ in AutoModelForCausalLM.from_pretrained(model).named_parameters()]
    before, *_, after = alone["weights"]
    return [after["actor"][name] - before["actor"][name] for name in names]


# --- what goes wrong on one rank ----------------------------------------------------------------


def check_untouched(found):
    """By batches that fail; and only the good ones after them count."""
    check_same(found["after_failures"], found["weights"][0])
    assert found["updates"] == 3


def check_same(found, expected):
    for role in expected:
        assert found[role].keys() == expected[role].keys()
        assert all(torch.equal(found[role][name], expected[role][name]) for name in expected[role])


@pytest.mark.parametrize("kind", SHORT)
def test_what_overflows_in_16_bits_is_forgotten(life, kind):
    for found in (life(kind).first, life(kind).second):
        assert "actor: the gradient norm is inf" in found["said"]
        check_untouched(found)


@pytest.mark.parametrize("kind", KINDS)
def test_what_fails_on_one_rank_fails_on_all_and_leaves_no_trace(life, kind):
    for found in (life(kind).first, life(kind).second):
        plugin, loss, gradient = found["said"]
        assert "task 99 is cursed" in plugin
        assert loss.startswith(("actor: the loss is inf", "actor: the loss is -inf"))
        assert "actor: the gradient norm is" in gradient
        check_untouched(found)


# --- state --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, *SHORT])
def test_a_resumed_run_is_bit_for_bit_the_one_that_never_stopped(life, kind):
    whole = life(kind).first["weights"][3]
    for role in whole:
        assert sum(value.numel() for value in whole[role].values()) > 20_000
    check_same(life(kind).first["resumed"], whole)


def check_taken_up(whole, resumed, alone):
    """By another number of ranks or kind of optimizer: the same update, but for rounding."""
    for role in whole:
        expected, found = ({"weights": [alone["weights"][0], weights]} for weights in (whole, resumed))
        assert gap(change(found, role, 1), change(expected, role, 1)) < 1e-3


@pytest.mark.parametrize("kind", ["zero-0", "zero-1", "zero-2", "zero-3"])
def test_another_number_of_ranks_takes_up_a_checkpoint(pair, single, life, alone, tiny_model, tmp_path, kind):
    of_two = life(kind)
    check_taken_up(of_two.first["weights"][3], single(go_on, tiny_model, kind, of_two.directory)[0], alone)
    (of_one,) = single(begin, tiny_model, kind, tmp_path)
    check_taken_up(of_one, pair(go_on, tiny_model, kind, tmp_path)[0], alone)
    for directory in (of_two.directory, tmp_path):
        assert not list(directory.rglob("*universal*"))


@pytest.mark.parametrize(
    ("first", "second"), [("zero-1", "zero-2"), ("zero-2-offload", "zero-1"), ("zero-2", "zero-2-offload-adam")]
)
def test_one_rank_takes_up_what_two_saved_by_another_stage_or_optimizer(single, life, alone, tiny_model, first, second):
    whole, resumed = life(first).first["weights"][3], single(go_on, tiny_model, second, life(first).directory)[0]
    check_taken_up(whole, resumed, alone)


@pytest.fixture(scope="module")
def saved_by_one(single, tiny_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("one")
    single(begin, tiny_model, "zero-2", directory)
    return directory


def test_a_checkpoint_that_would_run_code_is_refused(single, saved_by_one, tiny_model, tmp_path):
    shutil.copytree(saved_by_one, tmp_path, dirs_exist_ok=True)
    assert single(refusal, tiny_model, "zero-2", tmp_path) == ["loaded"]
    (file,) = (tmp_path / "actor").rglob("*optim_states.pt")
    torch.save({"optimizer_state_dict": Payload(tmp_path / "ran")}, file)
    assert "reading it could run code, which is refused" in single(refusal, tiny_model, "zero-2", tmp_path)[0]
    assert not (tmp_path / "ran").exists()


class Payload:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_what_a_checkpoint_cannot_be_resumed_with_is_said(single, saved_by_one, tiny_model, tmp_path):
    shutil.copytree(saved_by_one, tmp_path, dirs_exist_ok=True)
    assert single(refusal, tiny_model, "zero-1", tmp_path) == ["loaded"]
    assert "written with zero_stage 2, this run has 3" in single(refusal, tiny_model, "zero-3", tmp_path)[0]
    assert "written with precision fp32, this run has bf16" in single(refusal, tiny_model, "zero-2-bf16", tmp_path)[0]
    (tmp_path / "actor" / "shape.json").unlink()
    assert "was not written by the deepspeed backend" in single(refusal, tiny_model, "zero-2", tmp_path)[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["torch", "zero-2", "zero-3", "zero-3-persistent"])
def test_gathered_weights_are_the_whole_state_tied_heads_included(pair, tmp_path, kind, tied):
    source = write_tiny_model(tmp_path / "source", tied=tied)
    expected = AutoModelForCausalLM.from_pretrained(source).state_dict()
    found, _ = pair(save, source, kind, tmp_path / "saved")
    assert found.keys() == expected.keys()
    assert "lm_head.weight" in found
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(written[name], value) for name, value in expected.items())


def test_stage_3_gathers_no_more_than_a_bucket_at_a_time(pair, tiny_model):
    found, elsewhere = pair(buckets, tiny_model, "zero-3", 10_000)
    sizes = [sum(size for _, size in bucket) for bucket in found]
    largest = max(size for bucket in found for _, size in bucket)
    assert max(sizes) <= max(10_000, largest)
    assert len(sizes) > 5
    assert elsewhere == [[]] * len(found), "other ranks take part and keep nothing"


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]), functions=globals())
