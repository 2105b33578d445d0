"""Plugins given as Python objects: what a script or notebook passes in place of an installed plugin's name.

In the configuration such a plugin is called ``python:NAME``, so that whoever has only the configuration, as a resume from the
command line does, is told what is missing.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rlhf_host import hookspecs
from rlhf_host.errors import PluginError
from rlhf_host.hookspecs import hookimpl
from rlhf_host.plugins.discovery import PluginInfo
from rlhf_host.plugins.options import options_model, parse_options
from rlhf_host.plugins.selection import PYTHON, object_missing
from rlhf_host.records.episodes import Reward, Trajectory
from rlhf_host.records.needs import ScoreContext

PluginObjects: TypeAlias = Mapping[tuple[str, str], Any]
"""(kind, name) → an instance or class with hooks or, as a reward, a function."""


def look_up(objects: PluginObjects, kind: str, spec: str) -> Any:
    """What was given under ``spec``. Raises ``PluginError`` where nothing was."""
    name = spec.partition(":")[2]
    try:
        return objects[kind, name]
    except KeyError:
        raise PluginError(object_missing(kind, spec)) from None


def describe(kind: str, name: str, plugin: Any) -> PluginInfo:
    """The object as discovery describes an installed plugin."""
    home = plugin if hasattr(plugin, "__qualname__") else type(plugin)
    summary = " ".join((inspect.getdoc(plugin) or "").split("\n\n")[0].split())
    return PluginInfo(kind, name, PYTHON, "object", "any", "ok", summary, f"{home.__module__}:{home.__qualname__}")


def has_hooks(plugin: Any) -> bool:
    """Whether a class or instance implements any hook."""
    # dir() and not getmembers: reading a property may run anything.
    names = (name for name in dir(plugin) if not name.startswith("__"))
    return any(hasattr(inspect.getattr_static(plugin, name, None), f"{hookspecs.PROJECT}_impl") for name in names)


def build_object(info: PluginInfo, plugin: Any, options: Mapping[str, Any]) -> object:
    """The plugin: an instance as it is, a class made from its options, a function as a reward.

    Raises:
        PluginError: for options that do not fit, or an object that is no plugin.
    """
    who = f"{info.kind} {info.name!r} ({info.value})"
    # Instances and functions are built already, and take no options.
    parsed = parse_options(options_model(plugin if isinstance(plugin, type) else object), options, who)
    if isinstance(plugin, type):
        if not has_hooks(plugin):
            raise PluginError(f"{who}: the class marks no method with @hookimpl")
        try:
            return plugin() if plugin.__init__ is object.__init__ else plugin(parsed)  # type: ignore[misc]
        except Exception as error:
            raise PluginError(f"{who}: building it failed: {type(error).__name__}: {error}") from error
    if has_hooks(plugin):
        return plugin
    if info.kind == "reward" and callable(plugin):
        return FunctionReward(plugin, info.name)
    raise PluginError(f"{who}: neither a plugin's name nor a class or object with methods marked @hookimpl")


# --- functions as rewards -----------------------------------------------------------------------

_OFFERS: dict[str, Callable[[Trajectory, ScoreContext], Any]] = {
    "trajectory": lambda trajectory, context: trajectory,
    "text": lambda trajectory, context: trajectory.text,
    "label": lambda trajectory, context: trajectory.task.ground_truth,
    "prompt": lambda trajectory, context: trajectory.task.prompt,
    "task": lambda trajectory, context: trajectory.task,
    "context": lambda trajectory, context: context,
}
"""What a parameter of this name is given."""

BY_COUNT = {1: ("trajectory",), 2: ("text", "label")}
"""What parameters of other names are given, by how many there are."""

BATCHED = frozenset({"completions", "completion_ids", "prompts", "queries", "responses", "labels"})
"""Parameters of reward functions elsewhere that judge many answers in one call."""


class FunctionReward:
    """A function of one trajectory as a reward plugin.

    Its parameters say what it wants, by name: ``trajectory``, ``text``, ``label``, ``prompt``, ``task``,
    ``context``. If one has another name, one parameter gets the trajectory and two get text and label, unless one of these names
    would be given something else. Those with a default and another name keep it. It returns a number, ``None`` (could not judge),
    a ``Reward``, or true or false: 1 or 0, which count as the score too. It may be ``async``: then a group's calls run side by
    side.

    Raises:
        PluginError: when its parameters fit neither.
    """

    def __init__(self, function: Callable[..., Any], name: str):
        self.function = function
        self.arguments = reward_arguments(function, name)

    @hookimpl
    def score(self, trajectories: Sequence[Trajectory], context: ScoreContext) -> Any:
        values = [self._call(trajectory, context) for trajectory in trajectories]
        return _gathered(values) if any(map(inspect.isawaitable, values)) else list(map(_as_reward, values))

    def _call(self, trajectory: Trajectory, context: ScoreContext) -> Any:
        by_place = [_OFFERS[offer](trajectory, context) for name, offer in self.arguments if name is None]
        by_name = {name: _OFFERS[offer](trajectory, context) for name, offer in self.arguments if name is not None}
        return self.function(*by_place, **by_name)


def reward_arguments(function: Callable[..., Any], name: str) -> list[tuple[str | None, str]]:
    """What the function is called with: (its keyword, or ``None`` for a place; what it is given)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise PluginError(f"reward {name!r}: its parameters cannot be read; wrap it in def {name}(text, label)") from error
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.POSITIONAL_ONLY)]
    wanted = [p for p in named if p.default is p.empty]
    if all(p.name in _OFFERS and p.kind is not p.POSITIONAL_ONLY for p in wanted):
        known = [p.name for p in named if p.name in _OFFERS and p.kind is not p.POSITIONAL_ONLY]
        if known:
            return [(each, each) for each in known]
    names = [p.name for p in wanted]
    if batched := [each for each in names if each in BATCHED]:
        raise PluginError(
            f"reward {name!r} takes {', '.join(batched)}: here a reward function judges one answer and returns one number: "
            f"def {name}(text, label), or with trajectory, prompt, task or context by name"
        )
    offers = BY_COUNT.get(len(wanted), ())
    # A known name that would be given something else is a mistake, and would not show.
    in_place = all(each == offer or each not in _OFFERS for each, offer in zip(names, offers, strict=False))
    if offers and in_place and all(p.kind is not p.KEYWORD_ONLY for p in wanted):
        return [(None, offer) for offer in offers]
    raise PluginError(
        f"reward {name!r} takes ({', '.join(names)}): a reward function takes (text, label), "
        f"(trajectory), or any of {', '.join(_OFFERS)} by name"
    )


async def _gathered(values: Sequence[Any]) -> list[Any]:
    return list(map(_as_reward, await asyncio.gather(*values)))


def _as_reward(value: Any) -> Any:
    if isinstance(value, bool):
        return Reward(float(value), score=float(value))
    if value is None or isinstance(value, Reward):
        return value
    if getattr(value, "dtype", None) is not None and getattr(value, "ndim", None) == 0:  # of numpy and torch
        return _as_reward(value.item())
    return value
