"""Functions as rewards: which forms there are, told apart by the names of their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rlhf_host.errors import PluginError, asks_to_stop, blaming
from rlhf_host.hookspecs import hookimpl
from rlhf_host.plugins.about import about
from rlhf_host.plugins.discovery import unchosen
from rlhf_host.plugins.hints import of_nobody
from rlhf_host.plugins.selection import imported
from rlhf_host.plugins.threads import then, together
from rlhf_host.protocols.reward_forms import RewardForm
from rlhf_host.records.episodes import Failed, Reward, Task, Trajectory, Unjudged
from rlhf_host.records.metric_names import MetricNames
from rlhf_host.records.needs import ScoreContext

OFFERS: dict[str, Callable[[Trajectory, ScoreContext], Any]] = {
    "trajectory": lambda trajectory, context: trajectory,
    "text": lambda trajectory, context: trajectory.text,
    "label": lambda trajectory, context: trajectory.task.ground_truth,
    "prompt": lambda trajectory, context: trajectory.task.prompt,
    "metadata": lambda trajectory, context: trajectory.task.metadata,
    "task": lambda trajectory, context: trajectory.task,
    "context": lambda trajectory, context: context,
}
"""The value that a parameter of this name is given."""

NO_LABEL = "the task has no label"
BY_COUNT = {1: ("trajectory",), 2: ("text", "label")}
"""The values that parameters of other names are given, by how many there are."""
FOREIGN = {"completions", "completion_ids", "solution_str", "queries"}
"""Parameters of functions for other projects. Text and label are never meant by them."""


class FunctionReward:
    """A function as a reward plugin: one of a single trajectory, or one that a package calls as another project's trainer does
    (``protocols.RewardForm``).

    Its parameters say what it wants, by name: ``trajectory``, ``text``, ``label``, ``prompt``, ``metadata``, ``task``,
    ``context``. If one has another name, one parameter gets the trajectory and two get text and label, unless one of these names
    would be given something else. Those with a default and another name keep it. A task without label is not judged by a function
    that takes one, unless that parameter has a default. It returns a number, ``None`` (could not judge),
    a ``Reward``, or true or false: 1 or 0, which count as the score too. Where it raises, that trajectory is not judged. It may be
    ``async``: then a group's calls run side by side.

    Raises:
        PluginError: when its parameters fit no form.
    """

    def __init__(self, function: Callable[..., Any], name: str):
        self.function = function
        self.form = _form_of(function, name)
        self._prefix = f"reward/{name}/"
        self._names = MetricNames(f"reward {name!r}", prefix=self._prefix)
        self.arguments = [] if self.form else reward_arguments(function, name)
        self.optional = set() if self.form else with_default(function)

    @hookimpl
    def check_labels(self, tasks: Sequence[Task]) -> dict[int, str]:
        told = ((place, self._lack(task)) for place, task in enumerate(tasks))
        return {place: lack for place, lack in told if lack is not None}

    def _lack(self, task: Task) -> str | None:
        """Returns what a task has not that the function wants."""
        if self.form is not None:
            return self.form.lack(task)
        return NO_LABEL if task.ground_truth is None and self._wants_label else None

    @property
    def _wants_label(self) -> bool:
        return any(offer == "label" and name not in self.optional for name, offer in self.arguments)

    @hookimpl
    def score(self, trajectories: Sequence[Trajectory], context: ScoreContext) -> Any:
        if self.form is not None:
            return then(self.form.score(trajectories, context), lambda rewards: list(map(self._renamed, rewards)))
        values = [self._call(trajectory, context) for trajectory in trajectories]
        return then(together(values), lambda answers: list(map(as_reward, answers)))

    def _renamed(self, given: Any) -> Any:
        """Puts the reward's name in front of metrics of another project, such as ``entropy``, so that none is the host's own."""
        reward = as_reward(given)
        if not isinstance(reward, Reward) or not reward.metrics:
            return reward
        named = {self._prefix + name: value for name, value in reward.metrics.items() if self._names.takes(name)}
        return replace(reward, metrics=named)

    def _call(self, trajectory: Trajectory, context: ScoreContext) -> Any:
        arguments = self.arguments
        if trajectory.task.ground_truth is None:
            # Compared with None, every answer would be wrong.
            if self._wants_label:
                return Unjudged(NO_LABEL)
            arguments = [(name, offer) for name, offer in arguments if offer != "label"]
        by_place = [OFFERS[offer](trajectory, context) for name, offer in arguments if name is None]
        by_name = {name: OFFERS[offer](trajectory, context) for name, offer in arguments if name is not None}
        try:
            return self.function(*by_place, **by_name)
        except BaseException as error:
            return error


def _form_of(function: Callable[..., Any], name: str) -> RewardForm | None:
    """Returns the form of the project whose function it is, if a package knows it; ``None`` for the host's own."""
    try:
        names = inspect.signature(function).parameters.keys()
    except (TypeError, ValueError):
        return None
    if names <= OFFERS.keys():
        return None
    for info in unchosen("reward_form"):
        with blaming(str(info), "its call"):
            form: RewardForm | None = imported(info)(function)
        if form is not None:
            return form
    if names & FOREIGN:
        offer = of_nobody("they are called", "reward_form")
        raise PluginError(f"reward {name!r} takes ({', '.join(names)}), as functions for other projects do{offer}")
    return None


def reward_arguments(function: Callable[..., Any], name: str) -> list[tuple[str | None, str]]:
    """Returns what the function is called with: (its keyword, or ``None`` for a place; what it is given)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise PluginError(f"reward {name!r}: its parameters cannot be read; wrap it in def {name}(text, label)") from error
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.POSITIONAL_ONLY)]
    wanted = [p for p in named if p.default is p.empty]
    if all(p.name in OFFERS and p.kind is not p.POSITIONAL_ONLY for p in wanted):
        known = [p.name for p in named if p.name in OFFERS and p.kind is not p.POSITIONAL_ONLY]
        if known:
            return [(each, each) for each in known]
    names = [p.name for p in wanted]
    offers = BY_COUNT.get(len(wanted), ())
    # A known name that would be given something else is a mistake, and would not show.
    in_place = all(each == offer or each not in OFFERS for each, offer in zip(names, offers, strict=False))
    if offers and in_place and all(p.kind is not p.KEYWORD_ONLY for p in wanted):
        return [(None, offer) for offer in offers]
    foreign = "".join(f"; or it is one of another project's: {about(info)}" for info in unchosen("reward_form"))
    foreign = foreign or of_nobody("functions for other projects are called", "reward_form")
    raise PluginError(
        f"reward {name!r} takes ({', '.join(names)}): a reward function takes (text, label), "
        f"(trajectory), or any of {', '.join(OFFERS)} by name{foreign}"
    )


def with_default(function: Callable[..., Any]) -> set[str | None]:
    return {p.name for p in inspect.signature(function).parameters.values() if p.default is not p.empty}


def as_reward(value: Any) -> Any:
    """Returns what a function gave for a trajectory, or raised, as ``score`` gives it."""
    if isinstance(value, BaseException):
        if asks_to_stop(value) or type(value).__name__ == "BdbQuit":
            raise value
        return Failed.by(value)
    if isinstance(value, bool):
        return Reward(float(value), score=float(value))
    if value is None or isinstance(value, Reward | Unjudged):
        return value
    if getattr(value, "dtype", None) is not None and getattr(value, "ndim", None) == 0:  # of numpy and torch
        return as_reward(value.item())
    return value
