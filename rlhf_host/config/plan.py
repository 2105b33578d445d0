"""What a configuration asks of the host: its plugins and, together, their needs."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from pydantic import ValidationError

from rlhf_host.config.fieldtypes import coerce, section_model
from rlhf_host.config.messages import Origins, Path, fail, validation_lines, where
from rlhf_host.config.schema import PluginChoice, RunConfig
from rlhf_host.config.sections import MANY, SINGLE
from rlhf_host.config.trait_defaults import KINDS, RunTraits, swap_for_debugging
from rlhf_host.errors import PluginError, near_matches
from rlhf_host.plugins.discovery import HOST, PluginInfo, discover
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.plugins.options import describe_options
from rlhf_host.plugins.python_objects import Given, build_given, describe, look_up
from rlhf_host.plugins.selection import build, find, is_given, load, options_model, parse_choice, read_options
from rlhf_host.records.needs import Needs, RoleNeed

log = logging.getLogger(__name__)

EVAL_REWARD = "eval_reward"

NOTHING: Given = {}


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
    "train": ("agent", "algo", "reward", "extensions", "tracker", "sync"),
    "evaluate": ("agent", "reward"),
    "rollout": ("agent", "reward", "extensions"),
    "replay": ("algo", "reward", "extensions"),
}
"""What takes part in each use of a configuration."""


def chosen(config: RunConfig, use: Use = "train") -> list[Chosen]:
    """The run's plugins in the manager's order: agent, algorithm, rewards, extensions (``kl`` last), trackers, weight sync.

    Rewards of ``eval.reward`` have the kind ``eval_reward``. Training on saved trajectories plays and scores nothing.
    """
    keys = KEYS[use]
    if use == "train" and config.from_trajectories is not None:
        keys = tuple(key for key in keys if key not in ("agent", "reward"))
    found: list[Chosen] = []
    for key in keys:
        if key in SINGLE:
            choice = getattr(config, key)
            if choice is not None:
                found.append(Chosen(SINGLE[key], SINGLE[key], parse_choice(choice.plugin)[0], choice, (key,)))
            continue
        if not (use == "evaluate" and key == "reward" and config.eval.reward):
            for alias, choice in getattr(config, key).items():
                found.append(Chosen(MANY[key], MANY[key], alias, choice, (key, alias)))
        if key == "reward" and use in ("train", "evaluate"):
            for alias, choice in config.eval.reward.items():
                found.append(Chosen(EVAL_REWARD, "reward", alias, choice, ("eval", "reward", alias)))
        if key == "extensions" and config.kl.coef > 0 and use != "rollout":
            kl = PluginChoice(plugin=f"{HOST}:kl", options=config.kl.model_dump())
            found.append(Chosen("extension", "extension", "kl", kl, ("kl",)))
    return found


def complete(config: RunConfig, origins: Origins | None = None, use: Use = "train", given: Given = NOTHING) -> RunConfig:
    """The configuration with every chosen plugin found and its options validated and filled in.

    With ``debug``, engines, backends and runtimes whose code runs elsewhere give way to the default ones. A sync that nobody chose
    follows from the traits of the three.

    Args:
        use: what the configuration is for.
        given: plugins that are Python objects.

    Raises:
        PluginError: one line per plugin that is missing or misconfigured, with the place it was chosen.
    """
    config = config.model_copy(deep=True)
    places = origins or {}
    errors: list[str] = []
    known = discover()
    for key in KINDS:
        _complete_one(Chosen(key, key, getattr(config, key).plugin, getattr(config, key), (key,)), known, given, places, errors)
    if not errors:
        try:
            swapped = swap_for_debugging(config, known) if config.debug else []
            for line in swapped:
                log.warning(line)
            fitting = RunTraits.of(config, known).sync
            if swapped and config.sync.plugin != fitting:
                config.sync = PluginChoice(plugin=fitting)
            elif config.sync.plugin == RunConfig().sync.plugin and not {("sync",), ("sync", "plugin")} & set(places):
                config.sync.plugin = fitting  # options stay
        except PluginError as error:
            errors.append(str(error))
    for item in chosen(config, use):
        _complete_one(item, known, given, places, errors)
    tasks = {info.name for info in known if info.kind == "tasks"}
    for path, data in ((("data",), config.data), (("eval", "data"), config.eval.data)):
        for number, source in enumerate(data.sources):
            if source.options and source.path.rpartition(":")[2] in tasks:
                info = find("tasks", source.path, known)
                root = (*path, "sources", number, "options")
                source.options = _filled(info, source.options, source.name or source.path, root, places, errors)
    fail(errors, PluginError)
    return config


def _complete_one(item: Chosen, known: list[PluginInfo], given: Given, places: Origins, errors: list[str]) -> None:
    """Find the plugin and fill in its options; mistakes are appended to ``errors``."""
    try:
        if is_given(item.choice.plugin):
            plugin = look_up(given, item.group, item.choice.plugin)
            info, cls = describe(item.group, item.alias, plugin), plugin if isinstance(plugin, type) else object
        else:
            info, cls = find(item.group, item.choice.plugin, known), None
    except PluginError as error:
        errors.append(_at(item.path, places, str(error)))
        return
    if item.kind in KINDS and not item.choice.options:
        return
    root = (*item.path, "options") if item.path != ("kl",) else item.path
    item.choice.options = _filled(info, item.choice.options, item.alias, root, places, errors, cls)


def _filled(
    info: PluginInfo,
    options: dict[str, Any],
    alias: str,
    root: Path,
    origins: Origins,
    errors: list[str],
    cls: type | None = None,
) -> dict[str, Any]:
    """The plugin's options, validated and with defaults; mistakes are appended to ``errors``. ``cls``: where it is at hand."""
    try:
        cls = cls or load(info)
        model = options_model(cls)
    except PluginError as error:
        errors.append(_at(root, origins, str(error)))
        return options
    given = {key.replace("-", "_"): value for key, value in options.items()}
    fields = {option.name.partition(".")[0]: None for option in describe_options(model)}
    unknown = [key for key in given if key not in fields and model.model_config.get("extra") != "allow"]
    for key in unknown:
        hint = near_matches(key, fields) or ("; it has " + ", ".join(fields) if fields else "; it takes no options")
        errors.append(f"{where((*root, key), origins)}: {info.kind} {info.name!r} has no option {key!r}{hint}")
    given = coerced(model, {key: value for key, value in given.items() if key not in unknown})
    try:
        parsed = read_options(info, cls, given, alias)
    except PluginError as error:
        cause = error.__cause__
        lines = validation_lines(cause, origins, root, model) if isinstance(cause, ValidationError) else []
        errors += lines or [_at(root, origins, str(error))]
        return options
    filled = parsed.model_dump(mode="json")
    return filled if _same(model, filled, parsed) else given


def _at(path: Path, origins: Origins, message: str) -> str:
    """The message, after the place where there is one to show."""
    place = where(path, origins)
    return message if place == ".".join(map(str, path)) else f"{place}: {message}"


def coerced(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    result = {}
    for key, value in options.items():
        field = model.model_fields.get(key)
        inner = section_model(field.annotation) if field else None
        if inner is not None and isinstance(value, dict):
            result[key] = coerced(inner, value)
        else:
            result[key] = coerce(field.annotation if field else Any, value)
    return result


def _same(model: Any, filled: dict[str, Any], parsed: Any) -> bool:
    """Whether the options survive being written down (aliases and odd defaults of a plugin's own may not)."""
    try:
        return model.model_validate(filled) == parsed
    except ValidationError:
        return False


def build_plugins(config: RunConfig, use: Use = "train", given: Given = NOTHING) -> PluginManager:
    """The run's plugins, built from their options. ``complete`` the configuration first, with the same arguments."""
    known = discover()
    loaded = []
    for item in chosen(config, use):
        if is_given(item.choice.plugin):
            found = look_up(given, item.group, item.choice.plugin)
            info = describe(item.group, item.alias, found)
            plugin = build_given(info, found, item.choice.options)
        else:
            info = find(item.group, item.choice.plugin, known)
            plugin = build(info, item.choice.options, item.alias)
        loaded.append(Loaded(item.kind, item.alias, info, plugin, item.choice.weight, item.choice.options))
    return PluginManager(loaded, threads=not config.debug)


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
            outputs=tuple(dict.fromkeys(merged.outputs + needs.outputs)),
            forbids=tuple(dict.fromkeys(merged.forbids + needs.forbids)),
            rewards=merged.rewards and needs.rewards,
            on_policy=merged.on_policy or needs.on_policy,
            unit_rows=merged.unit_rows or needs.unit_rows,
            in_place=merged.in_place if needs.in_place is None else needs.in_place,
            rounded_weights=merged.rounded_weights or needs.rounded_weights,
        )
    for output in merged.outputs:
        same = [other for other in merged.outputs if (other.what, other.role) == (output.what, output.role)]
        if len(same) > 1:
            tops = f"top {same[0].top} and top {same[1].top}"
            raise PluginError(f"two plugins want different distributions of the role {output.role!r}: {tops}")
    return replace(merged, roles=tuple(need for _, need in roles.values()))


def _spec(need: RoleNeed) -> str:
    rate = "" if need.lr is None else f", learning rate {need.lr:g}"
    return f"{need.head} head, {'trainable' if need.trainable else 'frozen'}, from {need.source or 'its own model'}{rate}"


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
