"""The roles of one process.

Public, for runtimes of other distributions too. Importing it loads no torch, so a device can be chosen first.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_host.errors import blaming
from rlhf_host.plugins.specs import PluginSpec
from rlhf_host.protocols import Kernels, Ranks, RuntimeStart, ShardedModel, Writer
from rlhf_host.training.trained_roles import check_state, in_backend, role_views

__all__ = ["Roles", "check_state"]

log = logging.getLogger(__name__)


class Roles:
    """The models of one process: ``worker`` computes with them and trains them, ``weights`` gives the actor's weights to syncs.

    Use it on one thread.

    Args:
        start: ``start.roles`` may be some of the roles of ``start.needs``.
        ranks: the processes that train the same roles; default: only this one.

    Raises:
        UserError: models, options or versions that cannot be used here.
    """

    def __init__(self, start: RuntimeStart, ranks: Ranks | None = None):
        from rlhf_host.backends.one_process import OneProcess
        from rlhf_host.backends.weights import adapter_buckets
        from rlhf_host.models.adapter_files import load_adapter
        from rlhf_host.models.loading import context_length, load_model
        from rlhf_host.models.memory_plans import memory_plan
        from rlhf_host.training.role import Role
        from rlhf_host.training.soft_updates import refuse_different
        from rlhf_host.training.worker import Worker
        from rlhf_host.weight_sync.local_source import LocalWeights

        backend, ranks = start.backend.build(), ranks or OneProcess()
        self.kernels = chosen_kernels(start.kernels)
        chosen = [(need, start.roles[need.name]) for need in start.needs.roles if need.name in start.roles]
        views, models, pieces = role_views(chosen), {}, {}
        handled = {each.name for each, own in chosen if in_backend(each, own, backend.traits, ranks.processes)}
        for need, settings in chosen:
            if need.name in views:
                continue
            own: dict[str, Any] = {"head": need.head, "trainable": need.trainable}
            loads_shards = need.name in handled and backend.traits.loads_shards
            found: ShardedModel | None = backend.load_model(settings, **own) if loads_shards else None
            models[need.name] = load_model(settings, **own) if found is None else found.model
            if found is not None:
                pieces[need.name] = found
            elif loads_shards and ranks.process == 0 and ranks.processes > 1:
                log.warning("%s: this model cannot be read in pieces, so each rank loads all of it first", need.name)
            if need.trainable and ranks.rank == 0:
                _report_weights(need.name, models[need.name])
        for need, _ in chosen:
            if need.moves:  # before a backend splits one of them
                assert need.source is not None
                refuse_different(need.name, models[need.name], need.source, models[need.source])
        for view in views.values():
            if view.start is not None and not view.live:
                load_adapter(models[view.source], view.start, view.adapter)
        roles = {
            need.name: Role.of(
                need.name,
                models[need.name],
                start.train,
                kernels=self.kernels,
                backend=backend if need.name in handled else None,
                settings=settings,
                total_updates=start.total_updates - need.idle_steps * start.train.updates_per_batch,
                ranks=ranks,
                trainer=f"backend {start.backend.name}",
                pieces=pieces.pop(need.name, None),
                trainable=need.trainable,
                rounds="with masters" if need.moves else "no" if need.generates or need.name == "actor" else "yes",
            )
            for need, settings in chosen
            if need.name not in views
        }
        for name, view in views.items():
            source = roles[view.source]
            roles[name] = source.itself(name) if view.live else source.under(name, view.start and view.adapter)
        memory = memory_plan(roles, start.train, ranks)
        self.worker = Worker(roles, start.hooks, start.train, start.needs, ranks, seed=start.seed, memory=memory)
        self.backends = {name: role.backend for name, role in roles.items() if role.backend is not None}
        self.models = {name: role.passes.model for name, role in roles.items()}
        self.context_lengths = {name: context_length(model) for name, model in self.models.items()}
        """Longest row of each role, in tokens."""
        self.exact = all(role.passes.exact and (role.backend is None or role.backend.exact) for role in roles.values())
        """True if everything computes in 32 bits."""
        self.flops = roles["actor"].passes.model_flops if "actor" in roles else None
        self.weights: LocalWeights | None = None
        if (actor := self.models.get("actor")) is not None:
            weights = self.backends["actor"].weights if "actor" in self.backends else None
            everywhere = backend.traits.everywhere
            if start.adapter_rank:
                weights, everywhere = partial(adapter_buckets, actor), False
            self.weights = LocalWeights(actor, weights, rank=ranks.process, size=ranks.processes, everywhere=everywhere)

    def run(self, function: str, arguments: Mapping[str, Any]) -> Any:
        """Does the work of ``WeightSource.run`` on one rank. On its own thread, it may wait for other ends of a sync."""
        from rlhf_host.engines.loading import call_by_path

        return call_by_path(function, self.weights, arguments)

    def save_role(self, name: str, directory: str | Path) -> None:
        """Writes the role in Hugging Face format, without tokenizer. Collective."""
        self.copy_role(name, directory)()

    def copy_role(self, name: str, directory: str | Path) -> Writer:
        """Copies what ``save_role`` writes. Collective. Returns a function that writes it, for any thread of this process."""
        from rlhf_host.models.loading import copy_model, quiet_transformers

        if name not in self.backends:  # it moves with one that is trained, and every rank has all of it
            copied = None if self.worker.ranks.process else copy_model(self.models[name], directory)
            return partial(_write, [(f"role {name}", "save", copied)])
        trainer = self.worker.roles[name].trainer
        with quiet_transformers(), blaming(trainer, "save_model"):
            write = self.backends[name].save_model(Path(directory))
        return partial(_write, [(trainer, "save_model", write)])

    def save_state(self, directory: str | Path) -> None:
        """Writes optimizers and schedules, a folder for each role. Collective."""
        self.copy_state(directory)()

    def copy_state(self, directory: str | Path) -> Writer:
        """Copies what ``save_state`` writes, like ``copy_role``."""
        writers = []
        for name, backend in self.backends.items():
            Path(directory, name).mkdir(exist_ok=True)
            trainer = self.worker.roles[name].trainer
            with blaming(trainer, "save"):
                writers.append((trainer, "save", backend.save(Path(directory, name))))
        return partial(_write, writers)

    def load_state(self, directory: str | Path) -> None:
        """Loads optimizers and schedules. Collective."""
        for name, backend in self.backends.items():
            with blaming(self.worker.roles[name].trainer, "load"):
                backend.load(Path(directory, name))


def _write(writers: list[tuple[str, str, Writer | None]]) -> None:
    """Calls each writer, and frees its copy."""
    while writers:
        trainer, method, write = writers.pop(0)
        if write is not None:
            with blaming(trainer, method):
                write()


def _report_weights(name: str, model: Any) -> None:
    """Logs how many weights are trained, if not all, and what is in the model's files beside them."""
    from rlhf_host.models.adapters import expert_adapters, has_adapters
    from rlhf_host.models.carried import carried_by

    whole, trained = model.num_parameters(), model.num_parameters(only_trainable=True)
    if trained < whole:
        log.warning("%s: %s of %s weights are trained (%.2f %%)", name, f"{trained:,}", f"{whole:,}", 100 * trained / whole)
    experts = [each.numel() for own, each in model.named_parameters() if ".experts." in own and each.ndim == 3]
    if experts and has_adapters(model) and not expert_adapters(model):
        text = "%s: its experts (%s weights) stay frozen: to adapt them too, set lora.targets to all-linear,experts"
        log.warning(text, name, f"{sum(experts):,}")
    if carried := list(carried_by(model)):
        what = f"{len(carried)} tensors ({', '.join(carried[:3])}{', ...' * (len(carried) > 3)})"
        text = "%s: its files have %s that %s has no place for: not trained, and copied unchanged into checkpoints and exports"
        log.warning(text, name, what, type(model).__name__)


def with_tokenizer(write: Writer, tokenizer: Any, directory: Path) -> Writer:
    """Returns a function that writes a role, and then the tokenizer beside it. Pass a copy of the tokenizer: others use theirs
    meanwhile.
    """
    from rlhf_host.models.loading import save_tokenizer

    def both() -> None:
        write()
        save_tokenizer(tokenizer, directory)

    return both


def save_for_engine(model: Any, tokenizer: Any, directory: Path, *, with_weights: bool) -> Path:
    """Writes a model directory for an engine with its own weights, in ordinary form."""
    from rlhf_host.models import quantized
    from rlhf_host.models.carried import write_carried
    from rlhf_host.models.loading import quiet_transformers, save_tokenizer

    with quiet_transformers():
        if with_weights:
            quantized.widened(model).save_pretrained(directory)
        else:
            quantized.plain_config(model).save_pretrained(directory)
            model.generation_config.save_pretrained(directory)
            write_carried(model, directory)  # for drafts, which no sync reaches
        save_tokenizer(tokenizer, directory)
    return directory


def chosen_kernels(specs: Sequence[PluginSpec]) -> Kernels:
    """Returns the run's kernels, for this process: what the first of the plugins chooses among all; without any, the plain path."""
    from rlhf_host.engines.plain_path import PlainKernels

    candidates = [(spec.name, spec.build()) for spec in specs]
    for name, plugin in candidates[:1]:
        with blaming(f"kernels {name}", "choose"):
            kernels: Kernels = plugin.choose(candidates, PlainKernels())
            return kernels
    return PlainKernels()
