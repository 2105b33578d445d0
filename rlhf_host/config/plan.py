"""What a configuration asks of the host: its plugins, their needs, and whether the run is possible at all."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from rlhf_host.config.fieldtypes import coerce
from rlhf_host.config.layers import section_model
from rlhf_host.config.messages import Origins, Path, fail, validation_lines, where
from rlhf_host.config.schema import PluginChoice, RoleConfig, RunConfig
from rlhf_host.config.sections import MANY, ROLES, SINGLE
from rlhf_host.errors import PluginError, near_matches
from rlhf_host.plugins.discovery import HOST, discover
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.plugins.options import describe_options
from rlhf_host.plugins.selection import build, find, load, options_model, parse_choice, read_options
from rlhf_host.types import Needs, RoleNeed

EXTRAS = {"vllm": "vllm", "deepspeed": "deepspeed", "ray": "ray"}
"""The host's own engines, backends and runtimes that need a library of their own → the extra that brings it."""

PROTOCOLS = ("engine", "backend", "runtime")
"""Kinds that are no pluggy plugins: the runtime builds them."""


EVAL_REWARD = "eval_reward"


@dataclass(frozen=True, slots=True)
class Chosen:
    """One choice of the configuration: ``kind`` is the manager's, ``group`` the kind it is found under."""

    kind: str
    group: str
    alias: str
    choice: PluginChoice
    path: Path


def chosen(config: RunConfig, evaluation: bool = False) -> list[Chosen]:
    """The run's plugins in the manager's order: agent, algorithm, rewards, extensions (``kl`` last), trackers, weight sync.

    Rewards of ``eval.reward`` have the kind ``eval_reward``. ``evaluation``: only what evaluating needs.
    """
    keys = ("agent", "reward") if evaluation else ("agent", "algo", "reward", "extensions", "tracker", "sync")
    found: list[Chosen] = []
    for key in keys:
        if key in SINGLE:
            choice = getattr(config, key)
            if choice is not None:
                found.append(Chosen(SINGLE[key], SINGLE[key], parse_choice(choice.plugin)[0], choice, (key,)))
            continue
        if not (evaluation and config.eval.reward):
            for alias, choice in getattr(config, key).items():
                found.append(Chosen(MANY[key], MANY[key], alias, choice, (key, alias)))
        if key == "reward":
            for alias, choice in config.eval.reward.items():
                found.append(Chosen(EVAL_REWARD, "reward", alias, choice, ("eval", "reward", alias)))
        if key == "extensions" and config.kl.coef > 0:
            kl = PluginChoice(plugin=f"{HOST}:kl", options=config.kl.model_dump())
            found.append(Chosen("extension", "extension", "kl", kl, ("kl",)))
    return found


def complete(config: RunConfig, origins: Origins | None = None, evaluation: bool = False) -> RunConfig:
    """The configuration with every chosen plugin found and its options validated and filled in.

    Engines, backends and runtimes are imported only if options are set for them, because they may be heavy.

    Raises:
        PluginError: one line per plugin that is missing or misconfigured, with the place it was chosen.
    """
    config = config.model_copy(deep=True)
    places = origins or {}
    errors: list[str] = []
    known = discover()
    plain = [Chosen(SINGLE[key], SINGLE[key], getattr(config, key).plugin, getattr(config, key), (key,)) for key in PROTOCOLS]
    for item in [*chosen(config, evaluation), *plain]:
        try:
            info = find(item.group, item.choice.plugin, known)
            if item.kind in PROTOCOLS:
                _require_library(item, info.distribution)
            if item.kind in PROTOCOLS and not item.choice.options:
                continue
            cls = load(info)
            model = options_model(cls)
        except PluginError as error:
            errors.append(_at(item.path, places, str(error)))
            continue
        root = (*item.path, "options") if item.path != ("kl",) else item.path
        given = {key.replace("-", "_"): value for key, value in item.choice.options.items()}
        fields = {option.name.partition(".")[0] for option in describe_options(model)}
        unknown = [key for key in given if key not in fields and model.model_config.get("extra") != "allow"]
        for key in unknown:
            hint = near_matches(key, fields) or ("; it has " + ", ".join(sorted(fields)) if fields else "; it takes no options")
            errors.append(f"{where((*root, key), places)}: {info.kind} {info.name!r} has no option {key!r}{hint}")
        if unknown:
            continue
        given = _coerced(model, given)
        try:
            parsed = read_options(info, cls, given, item.alias)
        except PluginError as error:
            cause = error.__cause__
            found = validation_lines(cause, places, root, model) if isinstance(cause, ValidationError) else []
            errors += found or [_at(root, places, str(error))]
            continue
        filled = parsed.model_dump(mode="json")
        item.choice.options = filled if _same(model, filled, parsed) else given
    fail(errors, PluginError)
    return config


def _at(path: Path, origins: Origins, message: str) -> str:
    """The message, after the place where there is one to show."""
    place = where(path, origins)
    return message if place == ".".join(map(str, path)) else f"{place}: {message}"


def _coerced(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    result = {}
    for key, value in options.items():
        field = model.model_fields.get(key)
        inner = section_model(field.annotation) if field else None
        if inner is not None and isinstance(value, dict):
            result[key] = _coerced(inner, value)
        else:
            result[key] = coerce(field.annotation if field else Any, value)
    return result


def _same(model: Any, filled: dict[str, Any], parsed: Any) -> bool:
    """Whether the options survive being written down (aliases and odd defaults of a plugin's own may not)."""
    try:
        return model.model_validate(filled) == parsed
    except ValidationError:
        return False


def _require_library(item: Chosen, distribution: str) -> None:
    extra = EXTRAS.get(item.choice.plugin.rpartition(":")[2]) if distribution == HOST else None
    if extra and importlib.util.find_spec(extra) is None:
        raise PluginError(f"{item.kind} {item.choice.plugin!r} needs {extra}: pip install '{HOST}[{extra}]'")


def build_plugins(config: RunConfig, evaluation: bool = False) -> PluginManager:
    """The run's plugins, built from their options, without those of ``eval.reward``. ``complete`` the configuration first."""
    return _built([item for item in chosen(config, evaluation) if item.kind != EVAL_REWARD])


def eval_rewards(config: RunConfig, manager: PluginManager) -> PluginManager:
    """The plugins that score evaluations: those of ``eval.reward``, or the run's own ``manager``.

    Raises:
        PluginError: one of them needs a role of its own, which only the run's rewards can have.
    """
    if not config.eval.reward:
        return manager
    own = _built([replace(item, kind="reward") for item in chosen(config) if item.kind == EVAL_REWARD])
    roles = {need.name for need in merge_needs(own).roles} - {need.name for need in merge_needs(manager).roles}
    if roles:
        raise PluginError(
            f"eval.reward needs the role {min(roles)!r}, which is loaded for training rewards only: choose it with --reward, at weight 0"
        )
    return own


def _built(items: list[Chosen]) -> PluginManager:
    known = discover()
    loaded = []
    for item in items:
        info = find(item.group, item.choice.plugin, known)
        plugin = build(info, item.choice.options, item.alias)
        loaded.append(Loaded(item.kind, item.alias, info, plugin, item.choice.weight))
    return PluginManager(loaded)


# --- needs --------------------------------------------------------------------------------------


def merge_needs(manager: PluginManager) -> Needs:
    """What all plugins need together.

    Raises:
        UserError: two plugins need the same role differently, or different data.
    """
    merged = Needs()
    roles: dict[str, tuple[str, RoleNeed]] = {}
    data_from = ""
    for key, needs in manager.each("needs"):
        if needs.data is not None and merged.data not in (None, needs.data):
            raise PluginError(f"{data_from} trains on {merged.data} data and {key} on {needs.data}: choose one of them")
        data_from = data_from or (key if needs.data else "")
        for need in needs.roles:
            if need.name == "actor" and need.source == "actor":
                need = replace(need, source=None)
            owner, known = roles.setdefault(need.name, (key, need))
            if known != need:
                raise PluginError(
                    f"{owner} and {key} need the role {need.name!r} differently: {_spec(known)}, and {_spec(need)}"
                )
        merged = Needs(
            data=merged.data or needs.data,
            min_group_size=max(merged.min_group_size, needs.min_group_size),
            outputs=merged.outputs | needs.outputs,
            unit_rows=merged.unit_rows or needs.unit_rows,
            forbids=merged.forbids | needs.forbids,
        )
    return replace(merged, roles=tuple(need for _, need in roles.values()))


def _spec(need: RoleNeed) -> str:
    return f"{need.head} head, {'trainable' if need.trainable else 'frozen'}, from {need.source or 'its own model'}"


def old_logprobs_mode(config: RunConfig) -> str:
    """``fused``, ``recompute`` or ``sampler``: ``train.old_logprobs`` with ``auto`` decided."""
    if config.train.old_logprobs != "auto":
        return config.train.old_logprobs
    return "fused" if updates_per_batch(config) == 1 else "recompute"


def updates_per_batch(config: RunConfig) -> int:
    return config.train.epochs * config.train.minibatches


def kl_estimator(config: RunConfig) -> str:
    """``kl.estimator`` with ``auto`` decided."""
    if config.kl.estimator != "auto":
        return config.kl.estimator
    return "k1" if config.kl.place == "reward" else "unbiased"


# --- refusals -----------------------------------------------------------------------------------


def check(config: RunConfig, manager: PluginManager, needs: Needs) -> list[str]:
    """Refuse impossible runs before any model or file is touched; gives warnings about merely odd ones.

    Raises:
        UserError: one line per reason, each with what to do.
    """
    fail([*_plugin_refusals(config, manager, needs), *_setting_refusals(config), *_forbidden(config, manager)])
    needed = {need.name for need in needs.roles}
    idle = [role for role in config.roles if role not in needed and role != "actor"]
    return [f"roles.{role} is set, but no chosen plugin needs it: it is not loaded" for role in idle]


def check_evaluation(config: RunConfig) -> None:
    """Refuse evaluations that cannot be done. Raises ``UserError``, one line per reason."""
    lines = list(_eval_refusals(config))
    if not config.roles["actor"].model:
        lines.append("no model to evaluate: give --actor.model PATH, or --checkpoint RUN_DIR")
    if not config.eval.data.sources:
        lines.append("no evaluation data: give --eval.data PATH or --data PATH")
    if not (config.eval.reward or config.reward or _custom_agent(config)):
        lines.append("nothing judges the answers: give --reward NAME")
    fail(lines)


def _plugin_refusals(config: RunConfig, manager: PluginManager, needs: Needs) -> Iterator[str]:
    if config.algo is None:
        yield "no algorithm is chosen: give --algo NAME (rlhf plugins --kind algo lists them)"
    if needs.data not in (None, "prompts"):
        yield f"{config.algo.plugin if config.algo else 'a plugin'} trains on {needs.data} data, which is not supported by this version"
        return
    if not config.reward and not _custom_agent(config):
        yield "no reward is chosen: give --reward NAME (rlhf plugins --kind reward lists them)"
    for rewards in {manager, eval_rewards(config, manager)}:
        for key in (item.key for item in rewards.loaded if item.kind == "reward"):
            if key not in rewards.names("score"):
                yield f"{key} has no score hook, so it judges nothing"
    if config.algo is not None:
        for hooks in (("compute_advantages", "make_rows"), ("compute_loss",)):
            if not any(manager.has(hook) for hook in hooks):
                yield f"no chosen plugin implements {' or '.join(hooks)}: algorithm {config.algo.plugin!r} is incomplete"
    if not manager.has("agent_run") and not (manager.has("agent_reset") and manager.has("agent_step")):
        yield f"agent {config.agent.plugin!r} implements neither agent_run nor agent_reset and agent_step"
    yield from _role_refusals(config, needs)
    for key, own in manager.each("needs"):
        if own.min_group_size > config.rollout.n:
            yield f"{key} needs groups of at least {own.min_group_size}, and rollout.n is {config.rollout.n}: set --rollout.n {own.min_group_size} or more"


def _custom_agent(config: RunConfig) -> bool:
    """An agent other than the default may reward its own steps."""
    return config.agent.plugin != RunConfig().agent.plugin


def _role_refusals(config: RunConfig, needs: Needs) -> Iterator[str]:
    needed = {need.name: need for need in needs.roles}
    for name in config.roles:
        if name not in needed and name not in ROLES:
            yield f"roles.{name}: no chosen plugin knows this role{near_matches(name, {*needed, *ROLES})}"
    if not config.roles.get("actor", RoleConfig()).model:
        yield "no model to train: give --actor.model PATH"
    if not config.data.sources:
        yield "no training data: give --data PATH"
    for need in needed.values():
        if need.name != "actor" and need.source is None and not config.roles.get(need.name, RoleConfig()).model:
            flag = f"--{need.name.replace('_', '-')}.model" if need.name in ROLES else f"--roles.{need.name}.model"
            yield f"the role {need.name!r} has no model: give {flag} PATH"


def _setting_refusals(config: RunConfig) -> Iterator[str]:
    rollout, train, kl = config.rollout, config.train, config.kl
    if rollout.temperature == 0:
        yield "rollout.temperature is 0: greedy samples of a group are all the same; train with a temperature above 0"
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        value = getattr(rollout, name)
        if value != off:
            yield (
                f"rollout.{name} is {value}: training cannot correct for tokens that could not be drawn;"
                f" set --rollout.{name.replace('_', '-')} {off:g} (eval.{name} is free)"
            )
    if rollout.max_tokens is not None and rollout.max_new_tokens >= rollout.max_tokens:
        yield f"rollout.max_new_tokens {rollout.max_new_tokens} leaves no room for a prompt in rollout.max_tokens {rollout.max_tokens}"
    if train.minibatches > train.batch_size:
        yield (
            f"train.minibatches {train.minibatches} is more than train.batch_size {train.batch_size}:"
            " a batch is split between groups, so there can be at most one minibatch per prompt"
        )
    if train.old_logprobs == "fused" and updates_per_batch(config) > 1:
        yield (
            f"train.old_logprobs fused holds for one update per batch, and epochs {train.epochs} × minibatches {train.minibatches}"
            f" make {updates_per_batch(config)}: set --train.old-logprobs recompute"
        )
    if kl.coef > 0 and kl.place == "loss" and kl.estimator == "k1":
        yield "kl.estimator k1 in the loss has a gradient of zero in expectation: set --kl.estimator unbiased, or --kl.place reward"
    if kl.coef > 0 and kl.place == "reward" and kl_estimator(config) != "k1" and not kl.force:
        yield f"kl.estimator {kl.estimator} is biased in the reward: set --kl.estimator k1, or --kl.force to have it anyway"
    if "kl" in config.extensions:
        yield "the extension kl is configured at kl: leave --with kl out and set --kl.coef"
    if config.checkpoint.best and config.checkpoint.best.startswith("eval/") and not config.eval.data.sources:
        yield f"checkpoint.best is {config.checkpoint.best}, and nothing is evaluated: give --eval.data PATH"
    yield from _eval_refusals(config)


def _eval_refusals(config: RunConfig) -> Iterator[str]:
    large = [k for k in config.eval.k if k > config.eval.n]
    if large:
        yield f"eval.k {max(large)} needs at least as many samples, and eval.n is {config.eval.n}: set --eval.n {max(large)}"
    if config.eval.temperature == 0 and config.eval.n > 1:
        yield f"eval.temperature 0 makes {config.eval.n} equal samples: set --eval.n 1, or a temperature above 0"


def _forbidden(config: RunConfig, manager: PluginManager) -> Iterator[str]:
    """Settings that a plugin declares to be wrong for it: ``section.key=value``; without a section, of ``train``."""
    decided = {("train", "old_logprobs"): old_logprobs_mode(config), ("kl", "estimator"): kl_estimator(config)}
    for key, own in manager.each("needs"):
        for forbidden in sorted(own.forbids):
            name, _, value = forbidden.partition("=")
            path = tuple(name.split(".")) if "." in name else ("train", name)
            actual: Any = config
            for part in path:
                if not hasattr(actual, part):
                    raise PluginError(f"{key} forbids {forbidden!r}, and there is no such setting; tell its author")
                actual = getattr(actual, part)
            if value in (_text(actual), decided.get(path)):
                yield f"{key} does not work with {'.'.join(path)} {value}: set --{'.'.join(path).replace('_', '-')} to something else"


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
