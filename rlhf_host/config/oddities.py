"""Warnings about runs that work, but hardly as they were meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rlhf_host.config.defaults import RunTraits
from rlhf_host.config.schema import (
    DataConfig,
    EvalConfig,
    PluginChoice,
    RoleConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
    defaults,
)
from rlhf_host.config.section import Section
from rlhf_host.config.tree import ROLES, role_flag
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.plugins.options import options_model
from rlhf_host.plugins.recommended import recommended
from rlhf_host.plugins.selection import find, load
from rlhf_host.records.needs import AlgoNeeds, Needs

OF_ROWS = ("format", "split_at", "hh", "max_tokens", "long_rows", "history")
"""Settings of ``data`` for rows that have answers."""
OF_SAMPLES = ("n", "k", "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "reward")
"""Settings of ``eval`` for answers that are sampled."""
OF_TRAINING = (
    *("lora", "freeze", "train_only", "gradient_checkpointing", "lr", "router_aux_loss_coef", "schedule", "min_lr_ratio"),
    *("warmup_steps", "weight_decay", "betas", "adam_eps", "max_grad_norm"),
)
"""Settings of a role that is trained."""


def oddities(config: RunConfig, manager: PluginManager, needs: Needs, traits: RunTraits) -> Iterator[str]:
    """One line each."""
    needed = {name for need in needs.roles for name in (need.name, need.source)}
    for role in (role for role in config.roles if role not in needed and role != "actor"):
        yield f"roles.{role} is set, but no chosen plugin needs it: it is not loaded"
    if traits.engine.sleeps and not traits.runtime.remote:
        yield (
            f"the engine does not sleep with runtime {config.runtime.name}, where it is in the trainer's process: choose --runtime"
            f" {recommended('runtime', 'remote')}"
        )
    if config.in_flight_updates is not None and not config.async_depth:
        yield "in_flight_updates has no effect without --async-depth: nothing is sampled when new weights come"
    if config.agents and config.data.agent_key is None:
        alias = next(iter(config.agents))
        yield f"no column names the agent {alias}, so only tasks of plugins can ask for it: --data.agent-key COLUMN"
    yield from _unread(manager, needs)
    yield from _without_ratio(config, manager)
    yield from _idle(config, needs, traits)
    yield from _of_evaluation(config)


def _unread(manager: PluginManager, needs: Needs) -> Iterator[str]:
    """Usual roles that follow another, needed only by plugins which do nothing with them."""
    for role in (need.name for need in needs.roles if need.follows is not None and need.name in ROLES):
        by = [key for key, own in manager.needs().items() if role in (need.name for need in own.roles)]
        if all(manager.hooks(key) == ["needs"] for key in by):
            yield f"no chosen plugin reads the {role} that {' and '.join(by)} moves: it is loaded and changes nothing"


def updates_text(train: TrainConfig) -> str:
    return f"epochs {train.epochs} × minibatches {train.minibatches} make {train.updates_per_batch}"


def _without_ratio(config: RunConfig, manager: PluginManager) -> Iterator[str]:
    """Several updates on a batch, of which the later ones train what other weights sampled."""
    for key in (
        key for key, own in manager.needs().items() if not AlgoNeeds.of(own).ratio and config.train.updates_per_batch > 1
    ):
        yield (
            f"{updates_text(config.train)} updates per batch, and the loss of {key} has no ratio: nothing corrects the later"
            " updates for what the earlier ones changed; set both to 1, or choose a loss with a ratio"
        )


def _idle(config: RunConfig, needs: Needs, traits: RunTraits) -> Iterator[str]:
    """Settings that are not those of this kind of run."""
    if not needs.samples:
        idle = [*_changed("rollout", config.rollout, RolloutConfig(), RolloutConfig.model_fields)]
        idle += _changed("eval", config.eval, EvalConfig(), OF_SAMPLES) if config.eval.data.sources else []
        idle += [f"sync {config.sync.name}"] if config.sync.name not in ("", traits.sync) else []
        idle += _of_engine(config.engine)
        yield from [f"the run samples nothing, so {_have(idle)} no effect"] if idle else []
    else:
        parts = {"data": config.data, "eval.data": config.eval.data}
        idle = [each for place, data in parts.items() for each in _changed(place, data, DataConfig(), OF_ROWS)]
        yield from [f"the run samples answers to prompts, so {_have(idle)} no effect"] if idle else []
    for name in (need.name for need in needs.roles if not need.trainable and need.name in config.roles):
        idle = list(_changed(f"roles.{name}", config.roles[name], RoleConfig(), OF_TRAINING))
        yield from [f"the role {name} is not trained, so {_have(idle)} no effect"] if idle else []
    for need in needs.roles:
        if need.trainable and config.train.steps and need.idle_steps >= config.train.steps:
            yield f"the role {need.name} is idle in the first {need.idle_steps} steps, which is the whole run: it is not trained"
    for name, role in config.roles.items():
        if role.min_lr_ratio and role.schedule == "constant":
            yield f"roles.{name}.min_lr_ratio has no effect with the schedule constant: --{role_flag(name)}.schedule cosine"


def _of_engine(engine: PluginChoice) -> list[str]:
    """The engine if it is not the usual one, else its options that are not as usual."""
    if engine.name != defaults()["engine"]["name"]:
        return [f"engine {engine.name}"]
    usual = options_model(load(find("engine", engine.name)), "engine").model_construct().model_dump()
    return [f"engine.{name}" for name, value in (engine.model_extra or {}).items() if value != usual.get(name)]


def _of_evaluation(config: RunConfig) -> Iterator[str]:
    if not config.eval.data.sources:
        unused = list(_changed("eval", config.eval, EvalConfig(), EvalConfig.model_fields))
        yield from [f"nothing is evaluated without --eval.data, so {_have(unused)} no effect"] if unused else []
    elif config.from_trajectories is None:
        for name in ("system_prompt", "template", "template_kwargs", "agent_key"):
            if getattr(config.data, name) and not getattr(config.eval.data, name):
                flag = name.replace("_", "-")
                yield f"data.{name} is set and eval.data.{name} is not, so evaluation has none: --eval.data.{flag}"
    else:
        yield "training from saved trajectories evaluates nothing, so eval.data has no effect"


def _changed(place: str, section: Section, usual: Section, names: Iterable[str]) -> Iterator[str]:
    """Those of the settings that are not as usual."""
    for name in type(usual).model_fields:
        if name in names and getattr(section, name) != getattr(usual, name):
            yield f"{place}.{name}"


def _have(names: list[str]) -> str:
    return f"{', '.join(names)} {'has' if len(names) == 1 else 'have'}"
