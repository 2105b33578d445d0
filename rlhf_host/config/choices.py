"""What a configuration chooses: its plugins, found, their options validated and filled in, and what together they need."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ValidationError

from rlhf_host.config.defaults import KINDS, WORDS, RunTraits, kernels_to_try, swap_for_debugging
from rlhf_host.config.flags import Texts, coerce, last_counts
from rlhf_host.config.load import Origins, fail, validation_lines, where
from rlhf_host.config.schema import DataSource, PluginChoice, RewardChoice, RunConfig, SyncChoice
from rlhf_host.config.tree import DATA, MANY, SINGLE, Path
from rlhf_host.errors import PluginError, asks_to_stop, near_matches
from rlhf_host.hookspecs import RULES
from rlhf_host.plugins.discovery import PluginInfo, discover
from rlhf_host.plugins.hints import of_option, of_place
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.plugins.options import describe_options
from rlhf_host.plugins.python_objects import PluginObjects, build_object, describe, look_up
from rlhf_host.plugins.selection import build, find, is_object, load, options_model, parse_choice, read_options
from rlhf_host.records.needs import Needs, RoleNeed

log = logging.getLogger(__name__)

EVAL_REWARD = "eval_reward"

NOTHING: PluginObjects = {}


@dataclass(frozen=True, slots=True)
class Chosen:
    """One choice of the configuration: ``kind`` is the manager's, ``group`` the kind it is found under."""

    kind: str
    group: str
    alias: str
    choice: PluginChoice
    path: Path


Use: TypeAlias = Literal["train", "evaluate", "rollout", "replay"]

KEYS: dict[Use, tuple[str, ...]] = {
    "train": ("agent", "agents", "algo", "reward", "with", "tracker", "sync"),
    "evaluate": ("agent", "agents", "reward"),
    "rollout": ("agent", "agents", "reward", "with"),
    "replay": ("algo", "reward", "with"),
}
"""What takes part in each use of a configuration."""

SAMPLING = {name for name, rule in RULES.items() if rule.per == "agent"} | {"score", "keep_group"}
"""Hooks for which an extension takes part in sampling without training."""


def chosen(config: RunConfig, use: Use = "train") -> list[Chosen]:
    """The run's plugins in the manager's order: agents, algorithm, rewards, extensions, trackers, weight sync.

    Rewards of ``eval.reward`` have the kind ``eval_reward``. Training on saved trajectories plays and scores nothing.
    """
    keys = KEYS[use]
    if use == "train" and config.from_trajectories is not None:
        keys = tuple(key for key in keys if key not in ("agent", "agents", "reward"))
    items: list[Chosen] = []
    for key in keys:
        if key in SINGLE:
            items += _single(config, key)
            continue
        if not (use == "evaluate" and key == "reward" and config.eval.reward):
            choices = config.extensions if key == "with" else getattr(config, key)
            items += [Chosen(MANY[key], MANY[key], alias, choice, (key, alias)) for alias, choice in choices.items()]
        if key == "reward" and use in ("train", "evaluate"):
            for alias, choice in config.eval.reward.items():
                items.append(Chosen(EVAL_REWARD, "reward", alias, choice, ("eval", "reward", alias)))
    return items


def _single(config: RunConfig, key: str) -> list[Chosen]:
    choice = getattr(config, key)
    return [Chosen(SINGLE[key], SINGLE[key], parse_choice(choice.name)[0], choice, (key,))] if choice and choice.name else []


def complete(
    config: RunConfig, origins: Origins | None = None, use: Use = "train", objects: PluginObjects = NOTHING
) -> RunConfig:
    """The configuration with every chosen plugin found and its options validated and filled in.

    With ``debug``, engines, backends and runtimes whose code runs elsewhere give way to the default ones. A sync that nobody
    chose follows from the traits of the three.

    Args:
        use: what the configuration is for.
        objects: plugins that are Python objects.

    Raises:
        PluginError: one line per plugin that is missing or misconfigured, with the place it was chosen.
    """
    config = config.model_copy(deep=True)
    places = origins or {}
    errors: list[str] = []
    known = discover()
    kinds = (*KINDS, "kernels") if config.kernels.name not in WORDS else KINDS
    for item in (item for kind in kinds for item in _single(config, kind)):
        _complete_one(item, known, objects, places, errors)
    if config.kernels.name in WORDS and config.kernels.options:
        key = where(("kernels", next(iter(config.kernels.options))), places)
        errors.append(f"{key}: only kernels chosen by name (--kernels NAME) take options, not '{config.kernels.name}'")
    if not errors:
        try:
            swapped = swap_for_debugging(config, known) if config.debug else []
            for line in swapped:
                log.warning(line)
            fitting = RunTraits.of(config, known).sync
            if swapped and config.sync.name != fitting:
                config.sync = SyncChoice(name=fitting)
            config.sync.name = config.sync.name or fitting
            kernels_to_try(config.kernels, known)
        except PluginError as error:
            errors.append(str(error))
    for item in chosen(config, use):
        _complete_one(item, known, objects, places, errors)
    tasks = {info.name for info in known if info.kind == "tasks"}
    for path, data in zip(DATA, (config.data, config.eval.data), strict=True):
        for number, source in enumerate(data.sources):
            place = (*path, "sources", number)
            if source.path.rpartition(":")[2] not in tasks:
                unknown = {key: near_matches(key, DataSource.model_fields) for key in source.options}
                errors += [f"{where((*place, key), places)}: no such key{near}" for key, near in unknown.items()]
            elif source.options:
                info = find("tasks", source.path, known)
                _fill(info, source.options, source.name or source.path, place, places, errors)
    fail(errors, PluginError)
    return config


def _complete_one(item: Chosen, known: list[PluginInfo], objects: PluginObjects, places: Origins, errors: list[str]) -> None:
    """Find the plugin and fill in its options; mistakes are appended to ``errors``."""
    cls = None
    try:
        if is_object(item.choice.name):
            plugin = look_up(objects, item.group, item.choice.name)
            info, cls = describe(item.group, item.alias, plugin), plugin if isinstance(plugin, type) else object
        else:
            info = find(item.group, item.choice.name, known)
    except PluginError as error:
        errors.append(_at(item.path, places, str(error)))
        return
    _fill(info, item.choice.options, item.alias, item.path, places, errors, cls)


def _fill(
    info: PluginInfo,
    options: dict[str, Any],
    alias: str,
    path: Path,
    origins: Origins,
    errors: list[str],
    cls: type | None = None,
) -> None:
    """Validate the plugin's options and fill in defaults, in place; mistakes are appended to ``errors``.

    Args:
        cls: the plugin's class, where it is at hand.
    """
    try:
        cls = cls or load(info)
        model = options_model(cls, info.kind)
    except PluginError as error:
        errors.append(_at(path, origins, str(error)))
        return
    fields = {option.name.partition(".")[0]: None for option in describe_options(model)}
    unknown = [key for key in options if key not in fields and model.model_config.get("extra") != "allow"]
    for key in unknown:
        place = where((*path, key), origins)
        hint = of_place(place, options[key]) or near_matches(key, fields) or (of_option(place) if _samples(cls) else "")
        hint = hint or ("; it has " + ", ".join(fields) if fields else "; it takes no options")
        hint = "; write its options beside its name, without 'options:'" if key == "options" else hint
        errors.append(f"{place}: {info.kind} {info.name!r} has no option {key!r}{hint}")
    values = coerce(model, {key: value for key, value in options.items() if key not in unknown})
    for notice in _repeated(options, values, path, origins):
        log.warning(notice)
    try:
        parsed = read_options(info, cls, values, alias)
    except PluginError as error:
        cause = error.__cause__
        whose = f"{info.kind} {alias!r}"
        lines = validation_lines(cause, origins, path, whose) if isinstance(cause, ValidationError) else []
        errors += lines or [_at(path, origins, str(error))]
        return
    filled = parsed.model_dump(mode="json")
    options.clear()
    options.update(filled if _same(model, filled, parsed) else values)


def _repeated(texts: Any, values: Any, path: Path, origins: Origins) -> Iterator[str]:
    """Options that take one value, and were given several.

    Args:
        values: what ``coerce`` made of ``texts``.
    """
    if isinstance(texts, Texts) and not isinstance(values, list):
        yield from last_counts(where(path, origins), texts)
    elif isinstance(texts, dict) and isinstance(values, dict):
        for key in texts.keys() & values.keys():
            yield from _repeated(texts[key], values[key], (*path, key), origins)


def _samples(cls: type) -> bool:
    """Whether a plugin of this class, as it comes, belongs to runs that sample: names of such runs mean nothing to others."""
    try:
        needs: Needs = cls(options_model(cls)()).needs()
        return needs.samples
    except BaseException as error:  # a plugin's own, which says elsewhere what is wrong with it
        if asks_to_stop(error):
            raise
        return False


def _at(path: Path, origins: Origins, message: str) -> str:
    """The message, after the place where there is one to show."""
    place = where(path, origins)
    return message if place == ".".join(map(str, path)) else f"{place}: {message}"


def _same(model: type[BaseModel], filled: dict[str, Any], parsed: BaseModel) -> bool:
    """Whether the options survive being written down (aliases and odd defaults of a plugin's own may not)."""
    try:
        return model.model_validate(filled) == parsed
    except ValidationError:
        return False


def build_plugins(config: RunConfig, use: Use = "train", objects: PluginObjects = NOTHING) -> PluginManager:
    """The run's plugins, built from their options. ``complete`` the configuration first, with the same arguments."""
    known = discover()
    loaded = []
    for item in chosen(config, use):
        if is_object(item.choice.name):
            plugin_object = look_up(objects, item.group, item.choice.name)
            info = describe(item.group, item.alias, plugin_object)
            plugin = build_object(info, plugin_object, item.choice.options)
        else:
            info = find(item.group, item.choice.name, known)
            plugin = build(info, item.choice.options, item.alias)
        weight = item.choice.weight if isinstance(item.choice, RewardChoice) else 1.0
        loaded.append(Loaded(item.kind, item.alias, info, plugin, weight, item.choice.options))
    manager = PluginManager(loaded, threads=not config.debug)
    if use == "rollout":  # the others would ask for models that nothing here uses
        idle = {item for item in loaded if item.kind == "extension" and not SAMPLING & set(manager.hooks(item.key))}
        manager = PluginManager([item for item in loaded if item not in idle], threads=not config.debug)
    return manager


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
            raise PluginError(f"{data_from} is for {merged.data} data and {key} for {needs.data}: choose one of them")
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
            outputs=tuple(dict.fromkeys(merged.outputs + needs.outputs)),
            forbids=tuple(dict.fromkeys(merged.forbids + needs.forbids)),
            rewards=merged.rewards and needs.rewards,
            on_policy=merged.on_policy or needs.on_policy,
            unit_rows=merged.unit_rows or needs.unit_rows,
            separator=merged.separator if needs.separator is None else needs.separator,
            in_place=merged.in_place if needs.in_place is None else needs.in_place,
            rounded_weights=merged.rounded_weights or needs.rounded_weights,
            server=merged.server or needs.server,
        )
    for output in merged.outputs:
        same = [other for other in merged.outputs if (other.what, other.role) == (output.what, output.role)]
        if len(same) > 1:
            tops = f"top {same[0].top} and top {same[1].top}"
            raise PluginError(f"two plugins want different distributions of the role {output.role!r}: {tops}")
    return replace(merged, roles=tuple(need for _, need in roles.values()))


def _spec(need: RoleNeed) -> str:
    rate = "" if need.lr is None else f", learning rate {need.lr:g}"
    rate += f", after {need.idle_steps} steps" if need.idle_steps else ""
    kind = "trainable" if need.trainable else "frozen" + (" and generating" if need.generates else "")
    return f"{need.head} head, {kind}, from {need.source or 'its own model'}{rate}"
