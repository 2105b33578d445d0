"""Parts of a run, from its configuration: data, runtime, stream, collector, evaluation, loop."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_host.config.defaults import RunTraits, kernels_to_try, plugin_spec, weight_sync_plugin
from rlhf_host.config.schema import DataConfig, EvalConfig, RoleConfig, RolloutConfig, RunConfig
from rlhf_host.data.stream import TaskSet, TaskStream
from rlhf_host.errors import UserError
from rlhf_host.interrupts import signals_interrupt
from rlhf_host.models.adapter_files import rank_of
from rlhf_host.models.loading import sizes, stop_tokens
from rlhf_host.phases import phase
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.plugins.selection import build, find
from rlhf_host.protocols import Runtime, RuntimePlugin, RuntimeStart, SyncTarget, WeightSource, WeightSyncStart
from rlhf_host.records.episodes import Sampling, Task
from rlhf_host.records.needs import Needs, RoleHandle, RoleNeed
from rlhf_host.rollouts.collect import Collector
from rlhf_host.rollouts.endpoints import Endpoints
from rlhf_host.rollouts.episode_settings import MOST_TOKENS, EpisodeSettings, SampledModel
from rlhf_host.rollouts.episodes import Episodes
from rlhf_host.rollouts.gate import Barrier, Gate
from rlhf_host.runs.models import step_model
from rlhf_host.training.checkpoints import refuse_damaged
from rlhf_host.training.evaluate import Evaluation
from rlhf_host.training.role_handles import TrainerRole
from rlhf_host.training.role_settings import role_settings
from rlhf_host.weight_sync.bring import Bring, Probe, start_sync

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Started:
    """A runtime that is up, and the roles as plugins see them."""

    runtime: Runtime
    traits: RunTraits
    handles: dict[str, RoleHandle]
    needs: Needs
    roles: Mapping[str, RoleConfig]
    tokenizer: Any
    endpoints: Endpoints
    gate: Gate | None
    """Before the engine, where something samples."""
    scoring: Barrier | None
    """Before rewards whose state changes beside the steps, where a run has some."""
    bring: Bring | None
    """The way of weights to the engine, in runs that sample and train."""


def runtime_plugin(config: RunConfig) -> RuntimePlugin:
    plugin: Any = build(find("runtime", config.runtime.name), config.runtime.options)
    return plugin


def runtime_start(
    config: RunConfig, manager: PluginManager, needs: Needs, tokenizer: Any, total_updates: int, models: Mapping[str, Path]
) -> RuntimeStart:
    """
    Args:
        total_updates: optimizer updates of the whole run; 0: nothing is trained.
        models: where a role's weights come from instead: a checkpoint, whose files were checked.

    Raises ``UserError`` when another role's model lies in a checkpoint and is not as it was written.
    """
    roles = {need.name: role_settings(config.roles, need, models.get(need.name), needs) for need in needs.roles}
    for name, role in roles.items():
        for directory in (role.model, role.adapter):
            if directory and directory != str(models.get(name)):
                refuse_damaged(Path(step_model(directory) or directory).expanduser())
    rank = 0
    if config.sync.adapter == "adapter" and total_updates:
        rank = rank_of(roles["actor"].adapter) if roles["actor"].adapter else roles["actor"].lora.rank
        if rank == 0:
            raise UserError("sync.adapter is adapter, and the actor trains none: give --actor.lora.rank, or leave it out")
        if roles["actor"].quantize:
            raise UserError(
                "sync.adapter is adapter, and engines have the base as it was before it was quantized: leave it out"
            )
    return RuntimeStart(
        adapter_rank=rank,
        roles=roles,
        needs=needs,
        engine=plugin_spec(config, "engine") if needs.samples else None,
        backend=plugin_spec(config, "backend"),
        kernels=tuple(kernels_to_try(config.kernels)),
        hooks=manager,
        bring=_not_started,
        train=config.train.model_copy(update={"old_logprobs": config.old_logprobs_mode}),
        tokenizer=tokenizer,
        total_updates=total_updates,
        placement=tuple(config.placement),
        debug=config.debug,
        seed=config.seed,
    )


async def _not_started(targets: Sequence[SyncTarget], source: WeightSource, version: int) -> None:
    raise AssertionError("weights are brought to engines by runs that sample and train")


def start_runtime(config: RunConfig, start: RuntimeStart) -> Started:
    """Starts the runtime."""
    traits = RunTraits.of(config)
    phase(f"Loading {', '.join(start.roles)}" + (f", starting the engine {config.engine.name}" if start.engine else ""))

    bring = None
    if start.engine is not None and start.total_updates:
        plugin = weight_sync_plugin(config)

        def probe() -> Probe:
            exact = runtime.exact and not plugin.traits.rounded
            return Probe(handles["actor"].logprobs, runtime.context_lengths["actor"], exact)

        name, run_dir = f"weight sync {config.sync.name}", Path(config.run_dir) if config.run_dir else None
        bring = Bring(
            start_sync(plugin, name, WeightSyncStart(run_dir=run_dir)),
            name,
            config.sync.verify,
            start.tokenizer,
            config.rollout.temperature,
            probe,
        )
        start = replace(start, bring=bring)
    with signals_interrupt():
        runtime = runtime_plugin(config).start(start)
    temperature, threads = config.rollout.temperature if start.needs.samples else 1.0, not config.debug
    handles: dict[str, RoleHandle] = {
        name: TrainerRole(runtime.trainer, name, role, runtime.context_lengths[name], temperature=temperature, threads=threads)
        for name, role in start.roles.items()
    }
    manager, endpoints = start.hooks, Endpoints(port=config.rollout.policy_port)
    gate = Gate(runtime.engine) if runtime.engine is not None else None
    stateful = start.total_updates and config.async_depth and {*manager.names("score")} & {*manager.names("state_dict")}
    scoring = Barrier() if stateful else None
    needs, roles = start.needs, start.roles
    return Started(runtime, traits, handles, needs, roles, start.tokenizer, endpoints, gate, scoring, bring)


def stream_of(config: RunConfig, manager: PluginManager, tasks: TaskSet) -> TaskStream:
    def choose(tasks: Sequence[Task], count: int, step: int) -> Sequence[int | Task]:
        return manager.one("draw_tasks", tasks=tasks, count=count, step=step)

    chooser = next(iter(manager.names("draw_tasks")), "")
    return TaskStream(tasks, config.seed, config.data.shuffle, choose if chooser else None, chooser)


def collector_of(config: RunConfig, manager: PluginManager, started: Started) -> Collector:
    episodes = episodes_of(config, manager, started, config.data, config.rollout)
    return Collector(episodes, n=config.rollout.n, seed=config.seed, split="train", scoring=started.scoring)


def evaluation_of(
    config: RunConfig, manager: PluginManager, started: Started, held_out: TaskSet, data: DataConfig
) -> Evaluation:
    settings = config.eval
    episodes = episodes_of(config, manager, started, data, settings)
    collector = Collector(episodes, n=settings.n, seed=settings.seed, split="eval")
    return Evaluation(held_out.tasks, collector, settings, started.handles, started.tokenizer)


def episodes_of(
    config: RunConfig, manager: PluginManager, started: Started, data: DataConfig, drawn: RolloutConfig | EvalConfig
) -> Episodes:
    rollout = config.rollout
    sampling = Sampling(
        max_new_tokens=drawn.max_new_tokens or rollout.max_new_tokens,
        temperature=drawn.temperature,
        top_p=drawn.top_p,
        top_k=drawn.top_k,
        min_p=drawn.min_p,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
        support=drawn is rollout and bool(rollout.truncated_by),
    )
    context_length = started.runtime.context_lengths["actor"]
    longest = min(rollout.max_tokens or context_length, context_length)
    settings = EpisodeSettings(sampling=sampling, max_tokens=longest, data=data, rollout=rollout, strict=config.debug)
    assert started.gate is not None
    engine_name = f"engine {config.engine.name}"
    sees = started.traits.engine.images
    actor = _sampled_model(config.roles["actor"], started.gate, started.tokenizer, engine_name, sees)
    frozen = {
        need.name: _frozen_episodes(manager, started, need, settings, engine_name)
        for need in started.needs.roles
        if need.generates
    }
    return Episodes(manager, actor, settings, started.endpoints, frozen)


def _frozen_episodes(
    manager: PluginManager, started: Started, need: RoleNeed, settings: EpisodeSettings, engine_name: str
) -> Episodes:
    """The answers of a frozen role, sampled as the actor's are. A mixture's wait when the actor's do: it has its weights."""
    handle, role, name = started.handles[need.name], started.roles[need.name], f"{engine_name} of the role {need.name}"
    gate = Gate(started.runtime.engines[need.name], None if need.mixes is None else started.gate)
    model = _sampled_model(role, gate, handle.tokenizer, name, started.traits.engine.images)
    settings = replace(settings, max_tokens=min(settings.max_tokens, handle.context_length))
    return Episodes(manager, model, settings, started.endpoints)


def _sampled_model(role: RoleConfig, engine: Gate, tokenizer: Any, engine_name: str, sees: bool) -> SampledModel:
    tokens: dict[str, Any] = {"stop_ids": stop_tokens(role), "vocabulary": sizes(role)[0] or MOST_TOKENS}
    tokens["texts"] = max(tokenizer.get_vocab().values()) + 1
    return SampledModel(engine=engine, tokenizer=tokenizer, engine_name=engine_name, images=sees, **tokens)
