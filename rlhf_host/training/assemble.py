"""What a run is made of, from its configuration: data, runtime, stream, collector, evaluation, loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_host.config.defaults import kernels_to_try
from rlhf_host.config.schema import DataConfig, EvalConfig, RolloutConfig, RunConfig
from rlhf_host.data.sources import PythonRows, load_tasks
from rlhf_host.data.stream import TaskSet, TaskStream
from rlhf_host.models.loading import load_tokenizer, sizes
from rlhf_host.phases import phase
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.plugins.selection import build, find
from rlhf_host.plugins.specs import PluginSpec
from rlhf_host.protocols import Runtime, RuntimePlugin, RuntimeStart
from rlhf_host.records.episodes import Sampling, Task
from rlhf_host.records.needs import Needs, RoleHandle
from rlhf_host.rollouts.collect import Collector
from rlhf_host.rollouts.episodes import Episodes
from rlhf_host.training.evaluate import Evaluation
from rlhf_host.training.role_handles import TrainerRole
from rlhf_host.training.role_settings import role_settings
from rlhf_host.training.saved_rollouts import SavedRollouts
from rlhf_host.training.saved_rows import check_vocabulary
from rlhf_host.weight_sync.bring import Bring


@dataclass(slots=True)
class Inputs:
    """What is read before anything is written."""

    tokenizer: Any
    tasks: TaskSet | None = None
    held_out: TaskSet | None = None
    saved: SavedRollouts | None = None
    """In the place of tasks."""

    @property
    def notices(self) -> list[str]:
        held_out = [f"held out: {line}" for line in self.held_out.report] if self.held_out else []
        return [line for source in (self.tasks, self.saved) if source is not None for line in source.report] + held_out


@dataclass(slots=True)
class Started:
    """A runtime that is up, and the roles as plugins see them."""

    runtime: Runtime
    handles: dict[str, RoleHandle]
    needs: Needs
    tokenizer: Any


def runtime_plugin(config: RunConfig) -> RuntimePlugin:
    plugin: Any = build(find("runtime", config.runtime.name), config.runtime.options)
    return plugin


def runtime_start(
    config: RunConfig, manager: PluginManager, needs: Needs, tokenizer: Any, total_updates: int, models: Mapping[str, Path]
) -> RuntimeStart:
    """
    Args:
        total_updates: optimizer updates of the whole run; 0: nothing is trained.
        models: where a role's weights come from instead: a checkpoint.
    """
    return RuntimeStart(
        roles={need.name: role_settings(config.roles, need, models.get(need.name), needs) for need in needs.roles},
        needs=needs,
        engine=PluginSpec.of(find("engine", config.engine.name), config.engine.options),
        backend=PluginSpec.of(find("backend", config.backend.name), config.backend.options),
        kernels=tuple(kernels_to_try(config.kernels)),
        hooks=manager,
        bring=Bring(manager, config.sync.verify, tokenizer, config.rollout.temperature),
        train=config.train,
        tokenizer=tokenizer,
        total_updates=total_updates,
        placement=tuple(config.placement),
        debug=config.debug,
    )


def start_runtime(config: RunConfig, start: RuntimeStart) -> Started:
    phase(f"Loading {', '.join(start.roles)}, starting the engine {config.engine.name}")
    runtime = runtime_plugin(config).start(start)
    temperature, threads = config.rollout.temperature, not config.debug
    handles: dict[str, RoleHandle] = {
        name: TrainerRole(runtime.trainer, name, role, runtime.context_lengths[name], temperature=temperature, threads=threads)
        for name, role in start.roles.items()
    }
    bring = start.bring
    assert isinstance(bring, Bring)
    bring.logprobs, bring.context_length = handles["actor"].logprobs, runtime.context_lengths["actor"]
    bring.exact = runtime.exact and not start.needs.rounded_weights
    return Started(runtime, handles, start.needs, start.tokenizer)


def read_inputs(config: RunConfig, rows: PythonRows, manager: PluginManager) -> Inputs:
    tokenizer = load_tokenizer(config.roles["actor"])
    phase("Reading data")
    if config.from_trajectories is not None:
        saved = SavedRollouts(config)
        check_vocabulary(saved.saved, sizes(config.roles["actor"])[0])
        return Inputs(tokenizer, saved=saved)
    tasks = tasks_of(config, config.data, "train", tokenizer, config.seed, rows, manager)
    held_out = None
    if config.eval.data.sources:
        held_out = tasks_of(config, config.eval.data, "eval", tokenizer, config.eval.seed, rows, manager)
    return Inputs(tokenizer, tasks, held_out)


def prompt_room(config: RunConfig) -> int | None:
    """Longest prompt that leaves room for a token, in tokens; ``None``: nothing says."""
    limits = [limit for limit in (config.rollout.max_tokens, sizes(config.roles["actor"])[1]) if limit is not None]
    return min(limits) - 1 if limits else None


def tasks_of(
    config: RunConfig,
    data: DataConfig,
    split: Literal["train", "eval"],
    tokenizer: Any,
    seed: int,
    rows: PythonRows,
    manager: PluginManager,
) -> TaskSet:
    room = prompt_room(config)
    return load_tasks(data, split=split, tokenizer=tokenizer, seed=seed, max_prompt_tokens=room, rows=rows, manager=manager)


def stream_of(config: RunConfig, manager: PluginManager, tasks: TaskSet) -> TaskStream:
    def choose(tasks: Sequence[Task], count: int, step: int) -> Sequence[int | Task]:
        return manager.one("draw_tasks", tasks=tasks, count=count, step=step)

    return TaskStream(tasks, config.seed, config.data.shuffle, choose if manager.has("draw_tasks") else None)


def collector_of(config: RunConfig, manager: PluginManager, started: Started) -> Collector:
    episodes = _episodes(config, manager, started, config.data, config.rollout)
    return Collector(episodes, manager, config.rollout, n=config.rollout.n, seed=config.seed, split="train")


def evaluation_of(
    config: RunConfig, manager: PluginManager, started: Started, held_out: TaskSet, data: DataConfig
) -> Evaluation:
    settings = config.eval
    episodes = _episodes(config, manager, started, data, settings)
    collector = Collector(episodes, manager, config.rollout, n=settings.n, seed=settings.seed, split="eval")
    return Evaluation(held_out.tasks, collector, settings, started.handles, started.tokenizer)


def _episodes(
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
    )
    context_length = started.runtime.context_lengths["actor"]
    longest = min(rollout.max_tokens or context_length, context_length)
    name, engine = f"engine {config.engine.name}", started.runtime.engine
    return Episodes(manager, engine, started.tokenizer, data, sampling, longest, rollout, name)
