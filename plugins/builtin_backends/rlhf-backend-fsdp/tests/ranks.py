"""Short runs of the backend: the program of the processes of ``test_ranks.py``."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from rlhf_authoring.contracts import backend as rules
from rlhf_authoring.contracts.reinforce import actor, batch, manager_of
from rlhf_authoring.contracts.subject import Subject, expect, finish
from rlhf_authoring.contracts.suite import all_checks, run_check
from rlhf_backend_fsdp import FSDP, experts
from rlhf_backend_fsdp import backend as fsdp
from rlhf_backend_fsdp.backend import FSDPBackend
from rlhf_backend_fsdp.checkpoints import DataWriter
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlhf_host import LossTerm, Needs, Output, RoleNeed, RunError, UserError, functional, hookimpl
from rlhf_host.distributed import Ranks, load_sharded
from rlhf_host.internals import Denominators, PlainKernels, Role, Worker
from rlhf_host.models import load_model
from rlhf_host.protocols import ShardedModel
from rlhf_host.settings import RoleConfig, TrainConfig

ROWS = {
    1: [[0, 1, 2, 3, 4, 5, 6, 7]],
    2: [[0, 1, 2, 3, 4, 6], [5, 7]],
    4: [[0, 1, 2], [3, 4, 6], [5], [7]],
}
"""The rows of each rank, by the number of ranks."""
PARTLY: dict[str, dict[str, Any]] = {
    "whole": {},
    "frozen": {"freeze": ["*embed_tokens*", "*layers.0*"]},
    "lora": {"lora": {"rank": 4}},
    "recomputed": {"gradient_checkpointing": 1},
    "adapted": {"lora": {"rank": 4, "targets": ["all-linear", "experts"]}},
    "balanced": {"router_aux_loss_coef": 0.1},
}
HEADS: Any = {"actor": "lm", "critic": "scalar"}
TRAIN = TrainConfig(max_tokens_per_microbatch=24)


class Algorithm:
    """Policy gradient with an entropy bonus, and a critic."""

    @hookimpl
    def needs(self):
        critic = RoleNeed("critic", head="scalar", trainable=True)
        return Needs(
            data="prompts",
            roles=(RoleNeed("actor", trainable=True, source=None), critic),
            outputs=(Output("values"), Output("entropy")),
        )

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        if 99 in batch.task_index.tolist():
            raise ValueError("task 99 is cursed")
        if role == "critic":
            yield LossTerm("value", (outputs.values - batch.advantages) ** 2)
        else:
            yield LossTerm("policy", -batch.advantages * outputs.logprobs)
            yield LossTerm("entropy", -outputs.entropy, coefficient=0.1)


def in_pieces(settings: Any, name: str, whole: Any) -> tuple[Any, ShardedModel]:
    """Loads a role's model in pieces, with the scalar head of ``whole``. No block may be held while the next one is read."""
    found = load_sharded(settings, head=HEADS[name])
    assert found is not None

    def weights() -> Iterator[list[tuple[str, Tensor]]]:
        before: list[Any] = []
        for bucket in found.weights():
            assert all(tensor() is None for tensor in before)
            before = [weakref.ref(tensor) for _, tensor in bucket]
            given = [(key, whole.score.weight.detach() if key == "score.weight" else tensor) for key, tensor in bucket]
            del bucket
            yield given

    return found.model, replace(found, weights=weights)


class Trained:
    """An actor and a critic in the hands of the host's own worker."""

    def __init__(
        self,
        ranks: Ranks,
        models: dict[str, Path],
        what: str = "whole",
        kind: str = "fsdp",
        rows: list[list[int]] | None = None,
        kernels: Any = None,
        pieces: bool = False,
        replay: bool = False,
        **options: Any,
    ):
        plugin: Any = FSDP(FSDP.Options(**options)) if kind == "fsdp" else Subject("backend", kind, options).build()
        self.roles: dict[str, Role] = {}
        self.before: dict[str, Tensor] = {}
        for name, path in models.items():
            settings = actor(model=str(path), weight_decay=0.01, max_grad_norm=0.01, warmup_steps=2, **PARTLY[what])
            if options.get("optimizer") in ("SGD", "Rprop"):  # what they do not have
                without = {"adam_eps": RoleConfig().adam_eps} | (
                    {"weight_decay": 0.0} if options["optimizer"] == "Rprop" else {}
                )
                settings = settings.model_copy(update=without)
            model: Any = load_model(settings, head=HEADS[name], trainable=True)
            if name == "critic" and not model.score.weight.any():
                model.score.weight.data.normal_(generator=torch.Generator().manual_seed(3))
            self.before |= {f"{name}.{key}": value.clone() for key, value in model.state_dict().items()}
            more: Any = {"backend": plugin, "settings": settings, "total_updates": 30, "ranks": ranks, "kernels": kernels}
            if pieces:
                model, more["pieces"] = in_pieces(settings, name, model)
            self.roles[name] = Role.of(name, model, TRAIN, **more)
        algorithm = Algorithm()
        self.worker = Worker(self.roles, manager_of(algo=algorithm), TRAIN, algorithm.needs(), ranks)
        self.backends: dict[str, Any] = {name: role.backend for name, role in self.roles.items()}
        self.ranks, self.rows, self.number = ranks, (rows or ROWS[ranks.size])[ranks.rank], 0
        self.replay = replay
        for role in self.roles.values() if replay else ():
            role.passes.around = replayed

    def refused(self, bad: str) -> str:
        """Returns the refusal of a batch whose row 5 is spoilt."""
        rows = batch(0)
        if bad == "plugin":
            rows.task_index[5] = 99
        else:
            rows.advantages[5, 0] = float(bad)
        try:
            return str(self.worker.update(rows.select(self.rows), whole=Denominators.of(rows), rows=self.rows).refused)
        except RunError as failure:
            return str(failure)

    def update(self, count: int = 1) -> None:
        for _ in range(count):
            rows = batch(self.number)
            if self.replay:
                rows.traces = traces(rows, self.number)
            self.number += 1
            result = self.worker.update(rows.select(self.rows), whole=Denominators.of(rows), rows=self.rows)
            assert result.refused is None, result.refused

    @property
    def weights(self) -> dict[str, Tensor]:
        """Returns those of all roles, on rank 0."""
        buckets = [(name, bucket) for name, backend in self.backends.items() for bucket in backend.weights(4000)]
        return {f"{name}.{key}": value.clone() for name, bucket in buckets for key, value in bucket}

    def write(self, directory: Path) -> list[Any]:
        """Returns what writes all that a checkpoint holds of these roles."""
        writers = []
        for name, backend in self.backends.items():
            (directory / name).mkdir(parents=True, exist_ok=True)
            writers += [backend.save(directory / name), backend.save_model(directory / f"{name}-model")]
        return [write for write in writers if write is not None]


def replayed(model: Any, lengths: Sequence[int], traces: Any) -> Any:
    """Surrounds a pass as the extension ``router_replay`` does."""
    from rlhf_plugin_experts.routers import routers_of

    return contextlib.nullcontext() if traces is None else routers_of(model).during(lengths, traces)


def traces(rows: Any, seed: int) -> list[dict[str, Any]]:
    """Experts for all tokens of a batch but the last of each row, other ones than the routers would choose. Equal prompts have the
    same, because they are computed once.
    """

    def drawn(count: int, *seeds: int) -> Any:
        scores = np.random.default_rng([seed, *seeds]).random((count, 2, 4))
        return scores.argsort(-1)[..., :2].astype(np.uint8)

    numbered = enumerate(zip(rows.prompt_ids, rows.lengths.tolist(), strict=True))
    return [
        {"routed_experts": np.concatenate([drawn(len(prompt), *prompt), drawn(length - 1, 0, row)])}
        for row, (prompt, length) in numbered
    ]


def gradients(ranks: Ranks, path: Path, updates: int = 1, **named: Any) -> dict[str, Any]:
    """Gradients of the last update, whole, and its norm before clipping; the number of exchanges of tokens in it."""
    trained = Trained(ranks, {"actor": path}, **named)
    trained.worker.outputs("actor", "logprobs", batch(0).select(trained.rows))  # layouts are tried, which are passes too
    trained.update(updates - 1)
    backend = trained.backends["actor"]
    usual, found = backend.step, {}

    def step() -> Any:
        for name, weight in backend.model.named_parameters():
            if weight.grad is not None:
                gathered = getattr(backend, "_spreads", {}).get(name)
                grad = weight.grad if gathered is None else gathered.around(weight.grad.to_local()).full_tensor()
                found[name] = grad.clone()
        result = usual()
        found["norm"] = torch.tensor(result.grad_norm)
        return result

    with mock.patch.object(backend, "step", step), mock.patch.object(experts, "_swap", wraps=experts._swap) as swap:
        trained.update()
    return {"gradients": found, "exchanges": swap.call_count}


def steps(ranks: Ranks, models: dict[str, Path], count: int, **named: Any) -> dict[str, Any]:
    """Updates; the weights before and after, and the norms of the last one's gradients."""
    trained = Trained(ranks, models, **named)
    trained.update(count)
    return {"before": trained.before, "weights": trained.weights}


def failures(ranks: Ranks, models: dict[str, Path]) -> dict[str, Any]:
    """Returns the refusals of spoilt batches, and an update after them."""
    trained = Trained(ranks, models)
    said = [trained.refused(bad) for bad in ("plugin", "inf", "nan")]
    untouched = trained.weights
    trained.update()
    return {"said": said, "before": trained.before, "untouched": untouched, "weights": trained.weights}


def infer(ranks: Ranks, models: dict[str, Path], **named: Any) -> dict[str, Any]:
    """Log-probabilities and values before an update and after it, by rows."""
    trained = Trained(ranks, models, **named)
    found = []
    for _ in range(2):
        rows = batch(0).select(trained.rows)
        found.append((trained.worker.outputs("actor", "logprobs", rows), trained.worker.outputs("critic", "values", rows)))
        trained.update()
    return {"rows": trained.rows, "found": found}


def frozen(
    ranks: Ranks, path: Path, rows: list[list[int]], head: Any, dtype: Any, pieces: bool, **options: Any
) -> dict[str, Any]:
    """Outputs of a model that is not trained, whole and split, for this rank's rows; and the bytes held of its weights."""
    settings, algorithm = RoleConfig(model=str(path), device="cpu", dtype=dtype), Algorithm()
    found = load_sharded(settings, head=head, trainable=False) if pieces else None
    models: Any = [load_model(settings, head=head), load_model(settings, head=head) if found is None else found.model]
    split: Any = {"backend": FSDP(FSDP.Options(**options)), "settings": settings, "ranks": ranks, "pieces": found}
    roles = {
        "whole": Role.of("whole", models[0], TRAIN),
        "split": Role.of("split", models[1], TRAIN, trainable=False, **split),
    }
    assert roles["split"].backend is None
    worker = Worker(roles, manager_of(algo=algorithm), TRAIN, algorithm.needs(), ranks)
    mine = batch(0).select(rows[ranks.rank])
    said = [worker.outputs(name, "values" if head == "scalar" else "logprobs", mine) for name in roles]
    held = [sum(getattr(each, "_local_tensor", each).nbytes for each in model.parameters()) for model in models]
    return {"said": said, "held": held}


def twin(ranks: Ranks, models: dict[str, Path], *, stale: bool) -> dict[str, Any] | str:
    """Updates with kernels' twin of the model, which may hold a weight of its own."""

    class Twins(PlainKernels):
        def module(self, model: Any, use: Any) -> Any:
            made = functional.twin(model)
            if stale:
                made.model.layers[0].mlp.up_proj = copy.deepcopy(model.model.layers[0].mlp.up_proj)
            return made

    return refusal(ranks, models, kernels=Twins()) if stale else steps(ranks, models, 3, kernels=Twins())


def live(ranks: Ranks, models: dict[str, Path], directory: Path, **named: Any) -> dict[str, Any]:
    """Three updates. What was saved after the second is written while the third one runs."""
    trained = Trained(ranks, models, **named)
    trained.update(2)
    saved, writers = trained.weights, trained.write(directory)
    begun, stepped, data = threading.Event(), threading.Event(), DataWriter.write_data

    def late(*arguments: Any) -> Any:
        begun.set()
        assert stepped.wait(60)
        return data(*arguments)

    with mock.patch.object(DataWriter, "write_data", late):
        thread = threading.Thread(target=lambda: [write() for write in writers])
        thread.start()
        assert begun.wait(60)
        trained.update()
        stepped.set()
        thread.join()
    ranks.gather(None)
    return {"before": trained.before, "saved": saved, "weights": trained.weights}


def go_on(ranks: Ranks, names: list[str], directory: Path, **named: Any) -> dict[str, Tensor]:
    """The third update, from what was saved."""
    trained = Trained(ranks, {name: directory / f"{name}-model" for name in names}, **named)
    for name, backend in trained.backends.items():
        backend.load(directory / name)
    trained.number = 2
    trained.update()
    return trained.weights


def loaded_adapter(ranks: Ranks, base: Path, adapter: Path) -> dict[str, Tensor]:
    """Weights with a saved adapter merged, under the backend ``torch``."""
    settings = actor(model=str(base), adapter=str(adapter))
    model: Any = load_model(settings, trainable=True)
    plugin: Any = Subject("backend", "torch").build()
    role = Role.of("actor", model, TRAIN, backend=plugin, settings=settings, total_updates=1, ranks=ranks)
    assert role.backend is not None
    return {f"actor.{name}": value.clone() for bucket in role.backend.weights(4000) for name, value in bucket}


def refusal(ranks: Ranks, models: dict[str, Path], directory: Path | None = None, **named: Any) -> str:
    """Returns the refusal of a start, or of a checkpoint."""
    try:
        trained = Trained(ranks, models, **named)
        if directory is not None:
            trained.backends["actor"].load(directory / "actor")
    except UserError as error:
        return str(error)
    return "accepted"


class Moved(FSDPBackend):
    """Moves though it is on a CPU, where there is nowhere else to go."""

    _stays = False


def take_turns(ranks: Ranks, models: dict[str, Path], directory: Path, *, moves: bool, **named: Any) -> dict[str, Any]:
    """Weights after each of three updates; before it everything is away and is saved, or stays."""
    trained = Trained(ranks, models, **named)
    found: list[Any] = []
    away: list[dict[str, bool]] = []
    for number in range(3):
        for backend in trained.backends.values() if moves else []:
            backend.__class__ = Moved
            backend.offload()
            away.append(parked(backend))
            for call in (backend.step, partial(backend.run_pass, dict), partial(backend.load, directory)):
                with contextlib.suppress(RunError):
                    call()
                    raise AssertionError("it computes while it is away")
        weights = trained.weights
        for write in trained.write(directory / str(number)):
            write()
        for backend in trained.backends.values():
            assert bool(backend._parking) == moves, "a copy leaves things as they were"
            backend.reload()
        trained.update()
        found.append((weights, trained.weights))
    return {"found": found, "away": away}


def parked(backend: Any) -> dict[str, bool]:
    """For weights and averages, True if this process holds no byte of them on the device."""
    averages = [value for state in backend.optimizer.state.values() for value in state.values() if value.dim()]
    weights = [weight.to_local() for weight in backend._weights.values()]
    held = {"weights": weights, "averages": averages}
    return {name: not any(value.untyped_storage().nbytes() for value in values) for name, values in held.items()}


def pieces(ranks: Ranks, models: dict[str, Path], bucket_bytes: int, everywhere: bool, **named: Any) -> dict[str, Any]:
    """Bytes of the weights and averages that this process holds, of the whole model, and of each bucket."""
    backend = Trained(ranks, models, **named).backends["actor"]
    weights = backend._weights.values()
    assert all(isinstance(weight, DTensor) for weight in weights)
    buckets = [[(name, value.nbytes) for name, value in bucket] for bucket in backend.weights(bucket_bytes, everywhere)]
    return {
        "held": sum(weight.to_local().nbytes for weight in weights),
        "averages": sum(value.nbytes for state in backend.optimizer.state.values() for value in state.values() if value.dim()),
        "whole": sum(map(backend._nbytes, backend._weights)),
        "buckets": buckets,
    }


def share(ranks: Ranks, models: dict[str, Path], directory: Path) -> dict[str, int]:
    """Bytes of the model that this process keeps to write them, and the most that are whole meanwhile."""
    backend = Trained(ranks, models).backends["actor"]
    alive: dict[int, int] = {}
    most = 0

    def counted(tensor: Any, device: torch.device) -> Tensor:
        nonlocal most
        made = gathered(tensor, device)
        alive[id(made)] = made.nbytes
        weakref.finalize(made, alive.pop, id(made))
        most = max(most, sum(alive.values()))
        return made

    gathered = fsdp.whole
    with mock.patch.object(fsdp, "whole", counted), mock.patch.object(fsdp, "COPIED_BYTES", 10_000):
        writer = backend.save_model(directory)
    writer()
    kept = load_file(directory / f"model-{ranks.rank + 1:05d}-of-{ranks.size:05d}.safetensors")
    sizes = list(map(backend._nbytes, backend._weights))
    held = sum(value.nbytes for value in kept.values())
    return {"held": held, "most": most, "whole": sum(sizes), "largest": max(sizes)}


def contract(ranks: Ranks, kind: str, name: str, directory: Path) -> str:
    """Returns what a check of the contract says of a backend when each rank has some of the rows."""
    rows, numbers = ROWS[ranks.size][ranks.rank], itertools.count()

    class OnRanks(rules.Trained):
        def __init__(self, plugin: Any, **named: Any):
            super().__init__(plugin, ranks=ranks, **named)
            own = self.backend.weights

            def everywhere(bucket_bytes: int) -> Any:
                """Gives every rank what rank 0 has."""
                return ranks.gather([[(name, value.clone()) for name, value in bucket] for bucket in own(bucket_bytes)])[0]

            vars(self.backend)["weights"] = everywhere

        def update(self, data: Any = None) -> dict[str, float]:
            data = batch() if data is None else data
            update = self.worker.update(data.select(rows), whole=Denominators.of(data), rows=rows)
            expect(update.refused is None, f"a step was refused: {update.refused}")
            return update.metrics.result()

    @contextlib.contextmanager
    def folder() -> Iterator[str]:
        """Gives a directory that all ranks share."""
        path = directory / str(next(numbers))
        path.mkdir(exist_ok=True)
        yield str(path)

    def written(write: Any) -> None:
        finish(write)
        ranks.gather(None)  # others read what all have written

    model = ranks.gather(actor().model)[0]  # written by rank 0: transformers writes nothing on others

    def settings(**role: Any) -> Any:
        return actor(**{"model": model, **role})

    (check,) = [check for check in all_checks(("backend",)) if check.name == name]
    shared = {"Trained": OnRanks, "actor": settings, "tempfile": SimpleNamespace(TemporaryDirectory=folder), "finish": written}
    with mock.patch.multiple(rules, **shared):
        result = run_check(check, Subject("backend", kind))
    return "passed" if result.passed else result.message


def serve(rank: int, size: int, port: int) -> None:
    answers = sys.stdout.buffer
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        ranks = Ranks.join(rank, size, "127.0.0.1", port, timeout_s=120.0)
        with contextlib.suppress(EOFError):
            while True:
                name, arguments, named = pickle.load(sys.stdin.buffer)
                try:
                    answer = (True, globals()[name](ranks, *arguments, **named))
                except Exception:
                    answer = (False, traceback.format_exc())
                pickle.dump(answer, answers)
                answers.flush()


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
