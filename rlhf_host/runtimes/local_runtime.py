"""Roles and engine in this process; models are loaded, trained and sampled on one thread."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_host.engines.mixed import MixedKernels
from rlhf_host.errors import blaming
from rlhf_host.models.loading import load_model, load_tokenizer, model_directory
from rlhf_host.plugins.specs import PluginSpec
from rlhf_host.protocols import (
    NO_WEIGHTS,
    Compute,
    Engine,
    EnginePlugin,
    EngineStart,
    Kernels,
    RuntimeStart,
    SyncTarget,
    Update,
    Writer,
)
from rlhf_host.records.needs import RoleNeed
from rlhf_host.records.tensors import Batch, RoleOutput, TopK
from rlhf_host.runtimes.building import Roles, save_for_engine, with_tokenizer
from rlhf_host.runtimes.compute import Inline, OneThread
from rlhf_host.scratch import Scratch
from rlhf_host.training.reduction import Metrics
from rlhf_host.training.trained_roles import check_state
from rlhf_host.training.worker import Worker
from rlhf_host.weight_sync.local_source import LocalSource


class LocalTrainer:
    """A worker on the compute thread."""

    def __init__(self, worker: Worker, compute: Compute):
        self.worker, self._compute = worker, compute

    @property
    def compute_s(self) -> float:
        return self.worker.compute_s

    def outputs(self, role: str, what: RoleOutput, batch: Batch) -> Tensor:
        return self._compute.submit(partial(self.worker.outputs, role, what, batch)).result()

    def topk(self, role: str, k: int, batch: Batch) -> TopK:
        return self._compute.submit(partial(self.worker.topk, role, k, batch)).result()

    def update(self, batch: Batch, *, sampled_now: bool) -> Update:
        return self._compute.submit(partial(self.worker.update, batch, sampled_now=sampled_now)).result()

    def forward_backward(self, batch: Batch, *, sampled_now: bool, last: bool, plugins: Sequence[PluginSpec] = ()) -> Update:
        work = partial(self.worker.forward_backward, batch, sampled_now=sampled_now, last=last, plugins=plugins)
        return self._compute.submit(work).result()

    def optim_step(self) -> Update:
        return self._compute.submit(self.worker.optim_step).result()

    def gradients(self, patterns: Sequence[str]) -> dict[str, Tensor]:
        return self._compute.submit(partial(self.worker.gradients, patterns)).result()

    def evaluate(self, batch: Batch) -> Metrics:
        return self._compute.submit(partial(self.worker.evaluate, batch)).result()

    def adjust(self, role: str, *, lr: float) -> None:
        self._compute.submit(partial(self.worker.adjust, role, lr=lr)).result()

    def follow(self, role: str) -> None:
        self._compute.submit(partial(self.worker.follow, role)).result()


class LocalRuntime:
    def __init__(self, start: RuntimeStart):
        self._tokenizer, self._bring, self._needs = copy.deepcopy(start.tokenizer), start.bring, start.needs
        self._engine_name = f"engine {start.engine.name}" if start.engine is not None else ""
        self._compute = Inline() if start.debug else OneThread(start.train.threads)
        try:
            self._compute.submit(partial(self._load, start)).result()
        except BaseException:
            self._compute.close()
            raise

    def _load(self, start: RuntimeStart) -> None:
        self._roles = roles = Roles(start)
        assert roles.weights is not None
        self.context_lengths = roles.context_lengths
        self.trainer = LocalTrainer(roles.worker, self._compute)
        self.source = LocalSource(roles.models["actor"], roles.weights.buckets)
        self.engine: Engine | None = None
        self.engines: dict[str, Engine] = {}
        self.targets: list[SyncTarget] = []
        self.exact = roles.exact
        if start.engine is not None:
            self._start_engine(start.engine.build(), start, roles)
            frozen = [need for need in start.needs.roles if need.generates]
            self.engines = {need.name: self._start_frozen(start.engine.build(), need, start, roles) for need in frozen}
            mixtures = {need.name: self.engines[need.name] for need in frozen if need.mixes is not None}
            self.targets += [SyncTarget(name, engine, in_place=True, mixed=True) for name, engine in mixtures.items()]

    def _start_frozen(self, engine: EnginePlugin, need: RoleNeed, start: RuntimeStart, roles: Roles) -> Engine:
        """Starts an engine for a role whose weights do not change."""
        model: Any = roles.models[need.name]
        tokenizer = load_tokenizer(start.roles[need.name])
        kernels: Kernels = roles.kernels
        if need.mixes is not None:
            kernels = MixedKernels(kernels, roles.models["actor"], need.mixes)
        with Scratch("rlhf-engine-", tempfile.gettempdir()) as directory, blaming(self._engine_name, "start"):
            if engine.traits.takes != "module":
                model = save_for_engine(model, tokenizer, directory, with_weights=True)
            setup = EngineStart(model=model, tokenizer=tokenizer, version=0, compute=self._compute, kernels=kernels)
            return engine.start(setup)

    def _start_engine(self, engine: EnginePlugin, start: RuntimeStart, roles: Roles) -> None:
        model: Any = roles.models["actor"]
        in_place, trained = engine.traits.takes == "module", "actor" in roles.backends
        with Scratch("rlhf-engine-", tempfile.gettempdir()) as directory:
            if start.adapter_rank:
                base = start.roles["actor"].base
                model = model_directory(base) or save_for_engine(
                    load_model(base), start.tokenizer, directory, with_weights=True
                )
            elif not in_place:
                # To an actor that is not trained nothing is synced.
                model = save_for_engine(model, start.tokenizer, directory, with_weights=not trained)
            setup = EngineStart(
                model=model,
                tokenizer=start.tokenizer,
                version=0 if in_place or not trained else NO_WEIGHTS,
                compute=self._compute,
                kernels=roles.kernels,
                adapter_rank=start.adapter_rank,
            )
            with blaming(self._engine_name, "start"):
                self.engine = engine.start(setup)
        self.targets = [SyncTarget("local", self.engine, in_place)]
        self.exact = self.engine.exact and roles.exact

    async def sync(self, version: int) -> None:
        await self._bring(self.targets, self.source, version)

    def save_role(self, name: str, directory: Path) -> Writer:
        write = self._compute.submit(partial(self._roles.copy_role, name, directory)).result()
        return with_tokenizer(write, self._tokenizer, directory)

    def save_state(self, directory: Path) -> Writer:
        write: Writer = self._compute.submit(partial(self._roles.copy_state, directory)).result()
        return write

    def load_state(self, directory: Path) -> None:
        check_state(directory, self._needs)
        self._compute.submit(partial(self._roles.load_state, directory)).result()

    async def close(self) -> None:
        try:
            for engine in (self.engine, *self.engines.values()):
                if engine is not None:
                    with blaming(self._engine_name, "close"):
                        await engine.close()
        finally:
            self._compute.close()
