"""Roles and engine in this process; models are loaded, trained and sampled on one thread."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from rlhf_host.backends.ranks import Ranks
from rlhf_host.engines.kernels import TriedKernels
from rlhf_host.errors import UserError
from rlhf_host.models.loading import context_length, load_model, quiet_transformers
from rlhf_host.protocols import NO_WEIGHTS, Compute, Engine, EngineStart, RuntimeStart, SyncTarget, Update
from rlhf_host.records.tensors import Batch, TopK
from rlhf_host.runtimes.compute import Inline, OneThread
from rlhf_host.training.role import Role
from rlhf_host.training.worker import Worker
from rlhf_host.weight_sync.local_source import LocalSource


class LocalTrainer:
    """A worker on the compute thread."""

    def __init__(self, worker: Worker, compute: Compute):
        self.worker, self._compute = worker, compute

    @property
    def compute_s(self) -> float:
        return self.worker.compute_s

    def outputs(self, role: str, what: Literal["logprobs", "values", "scores"], batch: Batch) -> Tensor:
        return self._compute.submit(partial(self.worker.outputs, role, what, batch)).result()

    def topk(self, role: str, k: int, batch: Batch) -> TopK:
        return self._compute.submit(partial(self.worker.topk, role, k, batch)).result()

    def update(self, batch: Batch, *, sampled_now: bool) -> Update:
        return self._compute.submit(partial(self.worker.update, batch, sampled_now=sampled_now)).result()

    def adjust(self, role: str, *, lr: float) -> None:
        self._compute.submit(partial(self.worker.adjust, role, lr=lr)).result()


class LocalRuntime:
    def __init__(self, start: RuntimeStart):
        self._tokenizer, self._bring = start.tokenizer, start.bring
        self._compute = Inline() if start.debug else OneThread(start.train.threads)
        try:
            self._compute.submit(partial(self._load, start)).result()
        except BaseException:
            self._compute.close()
            raise

    def _load(self, start: RuntimeStart) -> None:
        kernels = TriedKernels([(spec.name, spec.build()) for spec in start.kernels])
        backend, engine, roles = start.backend.build(), start.engine.build(), {}
        in_place = engine.traits.takes == "module"
        if in_place and backend.traits.sharded and start.total_updates:
            raise UserError(
                f"backend {start.backend.name!r} spreads the actor's weights, and engine {start.engine.name!r} samples from them"
                " whole in the same process: choose options of the backend that keep weights whole (--backend.*), or an engine"
                " with weights of its own (--engine)"
            )
        for need in start.needs.roles:
            settings = start.roles[need.name]
            roles[need.name] = Role.of(
                need.name,
                load_model(settings, head=need.head, trainable=need.trainable),
                start.train,
                kernels=kernels,
                backend=backend if need.trainable else None,
                settings=settings,
                total_updates=start.total_updates,
                ranks=Ranks(),
            )
        self._roles = roles
        self.context_lengths = {name: context_length(role.passes.model) for name, role in roles.items()}
        worker = Worker(roles, start.hooks, start.train, start.needs)
        self.trainer = LocalTrainer(worker, self._compute)
        actor = roles["actor"]
        trained = actor.backend is not None
        self.source = LocalSource(actor.passes.model, actor.backend.weights if actor.backend is not None else None)
        model: Any = actor.passes.model
        version = 0 if in_place or not trained else NO_WEIGHTS
        with tempfile.TemporaryDirectory(prefix="rlhf-engine-") as directory:
            if not in_place:
                model = _saved(model, start.tokenizer, Path(directory), with_weights=not trained)
            self.engine: Engine = engine.start(
                EngineStart(model=model, tokenizer=start.tokenizer, version=version, compute=self._compute, kernels=kernels)
            )
        self.targets = [SyncTarget("local", self.engine, in_place)]
        exact = [role.backend.exact for role in roles.values() if role.backend is not None]
        self.exact = self.engine.exact and all(exact) and actor.passes.exact
        self.kernel_reports = kernels.reports

    async def sync(self, version: int) -> None:
        await self._bring(self.targets, self.source, version)

    def save_role(self, name: str, directory: Path) -> None:
        backend = self._roles[name].backend
        assert backend is not None

        def save() -> None:
            with quiet_transformers():
                backend.save_model(directory)

        self._compute.submit(save).result()
        self._tokenizer.save_pretrained(directory)

    def save_state(self, directory: Path) -> None:
        for name, role in self._roles.items():
            if role.backend is not None:
                (directory / name).mkdir()
                self._compute.submit(partial(role.backend.save, directory / name)).result()

    def load_state(self, directory: Path) -> None:
        check_trained(directory, [name for name, role in self._roles.items() if role.backend is not None])
        for name, role in self._roles.items():
            if role.backend is not None:
                self._compute.submit(partial(role.backend.load, directory / name)).result()

    async def close(self) -> None:
        await self.engine.close()
        self._compute.close()


def check_trained(directory: Path, trainable: Sequence[str]) -> None:
    """Raises ``UserError`` when a checkpoint's roles are not those this run trains."""
    saved = sorted(path.name for path in directory.iterdir())
    if saved != sorted(trainable):
        then, now = ", ".join(saved), ", ".join(sorted(trainable))
        raise UserError(f"the checkpoint trains {then}, this run {now}: resume with the algorithm it was started with")


def _saved(model: Any, tokenizer: Any, directory: Path, *, with_weights: bool) -> Path:
    """A model directory for an engine with weights of its own; to an actor that is not trained nothing is synced."""
    with quiet_transformers():
        if with_weights:
            model.save_pretrained(directory)
        else:
            model.config.save_pretrained(directory)
            model.generation_config.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    return directory
