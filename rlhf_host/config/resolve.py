"""One way from a configuration to its plugins: found, their options read and filled in, and what together they need."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ValidationError

from rlhf_host.config.defaults import KINDS, WORDS, RunTraits, kernels_to_try, swap_for_debugging
from rlhf_host.config.flag_names import of_others
from rlhf_host.config.flags import Alone, Texts, coerce, last_counts, takes_bool
from rlhf_host.config.problems import Origins, Path, Problems
from rlhf_host.config.schema import DataSource, PluginChoice, RewardChoice, RunConfig, SyncChoice
from rlhf_host.config.tree import DATA, MANY, SINGLE, fields_of
from rlhf_host.errors import PluginError, a, asks_to_stop, near_matches
from rlhf_host.hookspecs import RULES
from rlhf_host.plugins.discovery import PluginInfo, discover
from rlhf_host.plugins.hints import UnknownName, of_packages, of_place
from rlhf_host.plugins.manager import HookFailed, PluginManager
from rlhf_host.plugins.options import check_options, options_model
from rlhf_host.plugins.python_files import is_in_file
from rlhf_host.plugins.python_objects import PluginObjects, describe
from rlhf_host.plugins.selection import find, is_object, load, parse_choice
from rlhf_host.plugins.specs import PluginSpec
from rlhf_host.records.needs import AgentNeeds, AlgoNeeds, CorrectionNeeds, Needs, RewardNeeds, RoleNeed

log = logging.getLogger(__name__)

EVAL_REWARD = "eval_reward"

NOTHING: PluginObjects = {}


Use: TypeAlias = Literal["train", "evaluate", "rollout", "replay"]

KEYS: dict[Use, tuple[str, ...]] = {
    "train": ("agent", "agents", "algo", "reward", "with", "tracker"),
    "evaluate": ("agent", "agents", "reward"),
    "rollout": ("agent", "agents", "reward", "with"),
    "replay": ("algo", "reward", "with"),
}
"""Plugins that take part in each use of a configuration."""

SAMPLING = {name for name, rule in RULES.items() if rule.per == "agent"} | {"score", "keep_group"}
"""Hooks for which an extension takes part in sampling without training."""


ChosenPlugin: TypeAlias = tuple[str, str, PluginChoice, Path]
"""Kind as the plugin manager has it, alias, choice, and the place of the choice."""


def chosen(config: RunConfig, use: Use = "train") -> Iterator[ChosenPlugin]:
    """Yields the run's plugins in the manager's order: agents, algorithm, rewards, extensions, trackers.

    Rewards of ``eval.reward`` have the kind ``eval_reward``. Training on saved trajectories plays and scores nothing.
    """
    keys = KEYS[use]
    if use == "train" and config.from_trajectories is not None:
        keys = tuple(key for key in keys if key not in ("agent", "agents", "reward"))
    for key in keys:
        if key in SINGLE:
            yield from chosen_at(config, key)
        elif not (use == "evaluate" and key == "reward" and config.eval.reward):
            choices = config.extensions if key == "with" else getattr(config, key)
            yield from ((MANY[key], alias, choice, (key, alias)) for alias, choice in choices.items())
        if key == "reward" and use in ("train", "evaluate"):
            evaluation = config.eval.reward.items()
            yield from ((EVAL_REWARD, alias, choice, ("eval", "reward", alias)) for alias, choice in evaluation)


def chosen_at(config: RunConfig, *keys: str) -> Iterator[ChosenPlugin]:
    """Yields the plugins that are chosen under keys of ``SINGLE``."""
    for key in keys:
        choice: PluginChoice | None = getattr(config, key)
        if choice is not None and choice.name:
            yield SINGLE[key], parse_choice(choice.name)[0], choice, (key,)


def found_under(kind: str) -> str:
    """Returns the kind that discovery has for one of the plugin manager's."""
    return "reward" if kind == EVAL_REWARD else kind


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration whose plugins are found."""

    config: RunConfig
    """Complete: with options and defaults of all plugins."""
    specs: tuple[PluginSpec, ...]
    """Its plugins in the manager's order."""
    traits: RunTraits
    use: Use

    def plugins(self) -> PluginManager:
        """The run's plugins, built from their options. Raises ``PluginError`` for one that cannot be built."""
        threads = not self.config.debug
        manager = PluginManager.from_specs(self.specs, threads=threads)
        if self.use == "rollout":  # the others would ask for models that nothing here uses
            used = [item for item in manager.loaded if item.kind != "extension" or SAMPLING & {*manager.hooks(item.key)}]
            manager = PluginManager(used, threads=threads)
        return manager


def resolve(
    config: RunConfig, origins: Origins | None = None, use: Use = "train", objects: PluginObjects = NOTHING
) -> Resolved:
    """Find every chosen plugin, and read and fill in its options.

    With ``debug``, engines, backends and runtimes whose code runs elsewhere give way to the default ones. A sync that nobody
    chose follows from the traits of the three.

    Args:
        use: what the configuration is for.
        objects: plugins that are Python objects.

    Raises:
        PluginError: one line per plugin that is missing or misconfigured, with the place it was chosen.
    """
    config, problems = config.model_copy(deep=True), Problems(origins)
    known = discover()
    finder = _Finder(known, objects, problems)
    finder.choose(chosen_at(config, *KINDS))
    if config.kernels.name not in WORDS:
        finder.choose(chosen_at(config, "kernels"))
    elif config.kernels.options:
        key = ("kernels", next(iter(config.kernels.options)))
        problems.add(key, f"only kernels chosen by name (--kernels NAME) take options, not '{config.kernels.name}'")
    traits = None
    if not problems.lines:
        with problems.at(""):
            traits = _traits(config, finder)
    if use == "train":
        finder.choose(chosen_at(config, "sync"))
    specs = finder.choose(chosen(config, use))
    _read_sources(config, finder)
    problems.refuse(PluginError)
    assert traits is not None
    return Resolved(config, tuple(specs), traits, use)


def _traits(config: RunConfig, finder: _Finder) -> RunTraits:
    """Returns the traits of engine, backend and runtime, some swapped for debugging; chooses the sync that suits them."""
    swapped = swap_for_debugging(config, finder.known) if config.debug else []
    for line in swapped:
        log.warning(line)
    if swapped:
        finder.choose(chosen_at(config, *KINDS))  # fills in the options of the others
    traits = RunTraits.of(config, finder.known)
    if swapped and config.sync.name != traits.sync:
        config.sync = SyncChoice(name=traits.sync)
    config.sync.name = config.sync.name or traits.sync
    kernels_to_try(config.kernels, finder.known)
    return traits


def _read_sources(config: RunConfig, finder: _Finder) -> None:
    """Options of task plugins; other data takes none."""
    tasks = {info.name for info in finder.known if info.kind == "tasks"}
    for path, data in zip(DATA, (config.data, config.eval.data), strict=True):
        for number, source in enumerate(data.sources):
            place = (*path, "sources", number)
            if source.path.rpartition(":")[2] not in tasks and not is_in_file(source.path):
                for key in source.options:
                    finder.problems.add((*place, key), f"no such key{near_matches(key, DataSource.model_fields)}")
            elif source.options:
                with finder.problems.at(place):
                    info = find("tasks", source.path, finder.known)
                    finder.read(info, load(info), source.options, source.name or source.path, place)


class _Finder:
    """Finds plugins and reads their options; mistakes are added to ``problems``."""

    def __init__(self, known: list[PluginInfo], objects: PluginObjects, problems: Problems):
        self.known, self.objects, self.problems = known, objects, problems

    def choose(self, items: Iterable[ChosenPlugin]) -> list[PluginSpec]:
        """Those of the plugins that can be used."""
        specs = []
        for kind, alias, choice, path in items:
            with self.problems.at(path):
                group = found_under(kind)
                given = self.objects.get((group, choice.name.partition(":")[2])) if is_object(choice.name) else None
                if given is None:
                    info = find(group, choice.name, self.known)
                    cls = load(info)
                else:
                    info, cls = describe(group, alias, given), given if isinstance(given, type) else object
                if self.read(info, cls, choice.options, alias, path):
                    weight = choice.weight if isinstance(choice, RewardChoice) else 1.0
                    specs.append(PluginSpec(kind, alias, info, choice.options, weight, given))
        return specs

    def read(self, info: PluginInfo, cls: type, options: dict[str, Any], alias: str, path: Path) -> bool:
        """Fills in types and defaults of ``options``; returns False for options that do not fit."""
        model, problems = options_model(cls, info.kind), self.problems

        def hint(inside: tuple[str, ...], value: Any, near: str) -> str:
            if inside == ("options",):
                return "; write its options beside its name, without 'options:'"
            place = problems.where((*path, *inside))
            said = of_place(place, value) or of_others(info, inside[-1]) or near
            return said or (of_packages(UnknownName("option", place)) if _samples(cls) else "")

        for key, field in fields_of(model).items():
            if isinstance(options.get(key), Alone) and not takes_bool(field.annotation):
                problems.add((*path, key), "needs a value")
                return False
        values = coerce(model, dict(options))
        for notice in _repeated(options, values, path, problems):
            log.warning(notice)
        parsed, misfits = check_options(model, values, hint)
        for each in misfits:
            whose = f"{info.kind} {alias!r}" if each.of_plugin else ""
            problems.add((*path, *each.path), whose + each.text)
        if parsed is not None:
            filled = parsed.model_dump(mode="json")
            options.clear()
            options.update(filled if _same(model, filled, parsed) else values)
        return parsed is not None


def _repeated(texts: Any, values: Any, path: Path, problems: Problems) -> Iterator[str]:
    """Options that take one value, and were given several.

    Args:
        values: what ``coerce`` made of ``texts``.
    """
    if isinstance(texts, Texts) and not isinstance(values, list):
        yield from last_counts(problems.where(path), texts)
    elif isinstance(texts, dict) and isinstance(values, dict):
        for key in texts.keys() & values.keys():
            yield from _repeated(texts[key], values[key], (*path, key), problems)


def _samples(cls: type) -> bool:
    """Returns True if a plugin of this class, as it comes, belongs to runs that sample: their names mean nothing to others."""
    try:
        needs: Needs = cls(options_model(cls)()).needs()
        return needs.samples
    except BaseException as error:  # a plugin's own, which says elsewhere what is wrong with it
        if asks_to_stop(error):
            raise
        return False


def _same(model: type[BaseModel], filled: dict[str, Any], parsed: BaseModel) -> bool:
    """Returns True if the options survive being written down (aliases and odd defaults of a plugin's own may not)."""
    try:
        return model.model_validate(filled) == parsed
    except ValidationError:
        return False


# --- needs --------------------------------------------------------------------------------------


def merge_needs(manager: PluginManager) -> AlgoNeeds:
    """Returns what all plugins need together.

    Raises:
        UserError: two plugins need the same role differently, or different data; or needs are those of another kind of plugin.
    """
    merged = AlgoNeeds()
    roles: dict[str, tuple[str, RoleNeed]] = {}
    data_from = ""
    for key, needs in _needs(manager).items():
        _refuse_other_needs(key, needs, manager)
        own = AlgoNeeds.of(needs)
        if needs.data is not None and merged.data not in (None, needs.data):
            raise PluginError(f"{data_from} is for {merged.data} data and {key} for {needs.data}: choose one of them")
        data_from = data_from or (key if needs.data else "")
        for need in needs.roles:
            if need.name == "actor" and need.source == "actor":
                need = replace(need, source=None)
            owner, known = roles.setdefault(need.name, (key, need))
            differently = f"{owner} and {key} need the role {need.name!r} differently"
            try:  # it moves, generates or mixes if one plugin says so
                known, need = _joined(known, need), _joined(need, known)
            except ValueError as error:
                raise PluginError(f"{differently}: {error}") from error
            roles[need.name] = (owner, known)
            if known != need:
                raise PluginError(f"{differently}: {_spec(known)}, and {_spec(need)}")
        merged = AlgoNeeds(
            data=merged.data or needs.data,
            min_group_size=max(merged.min_group_size, needs.min_group_size),
            outputs=tuple(dict.fromkeys(merged.outputs + needs.outputs)),
            forbids=tuple(dict.fromkeys(merged.forbids + needs.forbids)),
            rewards=merged.rewards and needs.rewards,
            on_policy=merged.on_policy or needs.on_policy,
            unit_rows=merged.unit_rows or own.unit_rows,
            texts=merged.texts or own.texts,
            separator=merged.separator if own.separator is None else own.separator,
        )
    for output in merged.outputs:
        same = [other for other in merged.outputs if (other.what, other.role) == (output.what, output.role)]
        if len(same) > 1:
            tops = f"top {same[0].top} and top {same[1].top}"
            raise PluginError(f"two plugins want different distributions of the role {output.role!r}: {tops}")
    return replace(merged, roles=tuple(need for _, need in roles.values()))


def _needs(manager: PluginManager) -> dict[str, Needs]:
    try:
        return manager.needs()
    except HookFailed as error:
        raise PluginError(str(error)) from error


NEEDED: dict[type[Needs], tuple[str, ...]] = {
    AgentNeeds: ("agent_reset", "agent_run"),
    RewardNeeds: ("score",),
    CorrectionNeeds: ("importance_weights",),
}
"""Needs of a kind → hooks of which a plugin that has them must have one."""


def _refuse_other_needs(key: str, needs: Needs, manager: PluginManager) -> None:
    """Raises ``PluginError`` for needs of another kind of plugin, which nobody would ask for."""
    kind, given = manager.by_key[key].kind, type(needs).__name__
    if needs.kinds and kind not in needs.kinds:
        own = next((of.__name__ for of in (AlgoNeeds, AgentNeeds, RewardNeeds) if kind == of.kinds[0]), "Needs")
        raise PluginError(f"{key} returns {given} from needs, which is not for {a(kind)}: return {own}")
    if (hooks := NEEDED.get(type(needs))) and not {*hooks} & {*manager.hooks(key)}:
        raise PluginError(f"{key} returns {given} from needs, and has no {' or '.join(hooks)}: return Needs")


def _joined(need: RoleNeed, other: RoleNeed) -> RoleNeed:
    """Returns the need with what only the other says. Raises ``ValueError`` where one role cannot be both."""
    return replace(
        need,
        follows=need.follows or other.follows,
        generates=need.generates or other.generates,
        mixes=other.mixes if need.mixes is None else need.mixes,
    )


def _spec(need: RoleNeed) -> str:
    rate = "" if need.lr is None else f", learning rate {need.lr:g}"
    rate += f", after {need.idle_steps} steps" if need.idle_steps else ""
    kind = "trainable" if need.trainable else "frozen" + (" and generating" if need.generates else "")
    kind += "" if need.mixes is None else f" with a share of {need.mixes:g} in a mixture"
    if need.follows is not None:
        kind = f"following by {need.follows.share:g} every {need.follows.every} steps"
    kind += " and with its own tokens" if need.own_tokens else ""
    return f"{need.head} head, {kind}, from {need.source or 'its own model'}{rate}"
