"""Interface of packages that call reward functions as other projects do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rlhf_host.records.episodes import Task, Trajectory
from rlhf_host.records.needs import ScoreContext


class RewardForm(Protocol):
    """A reward function that is written for another project. An entry point of the group ``rlhf.reward_forms`` names a callable
    that takes a function and returns its form, or ``None`` for one that it does not know. The first sentence of its docstring says
    which forms it knows. It is imported for a function with a parameter that the host has no value for, and no earlier.
    """

    def lack(self, task: Task) -> str | None:
        """Return what the function wants and a task does not have: ``no label``. ``None``: nothing."""

    def score(self, trajectories: Sequence[Trajectory], context: ScoreContext) -> Any:
        """Return what the hook ``score`` returns for a group, or what gives it when it is awaited; for a trajectory for which the
        function raised, the exception. The names of metrics are the function's own: the host puts the reward's in front.
        """
