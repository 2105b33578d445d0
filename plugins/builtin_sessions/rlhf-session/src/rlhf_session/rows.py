"""Rows to train on, in the simplest form: token ids, and what is known of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, cast

from rlhf_host import Reward, Segment, Task, Trajectory, UserError


@dataclass(slots=True, kw_only=True)
class TrainingRow:
    """A row to train on, as ``TrainableSession.generate`` returns it, or made by hand. ``T`` is its number of completion tokens."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    """``[T]``: of the tokens, by the engine that sampled them; None: unknown."""
    mask: Sequence[bool | int] | None = None
    """``[T]``: false for tokens that the policy did not choose, such as those of a tool's answer; None: it chose all."""
    advantages: float | Sequence[float] | None = None
    """One for all tokens, or ``[T]``; None: the algorithm's, from the rewards, or none."""
    reward: float | None = None
    group: Any = None
    """Rows with one value are answers to one prompt; None: the row is alone."""
    columns: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    """A number becomes ``batch.columns[name]``, ``[T]`` becomes ``batch.token_columns[name]``."""
    version: int = 0
    """Version of the weights that sampled it."""
    text: str = ""
    """The completion as text, for its reader."""

    def trajectory(self, number: int) -> Trajectory:
        """Returns it as a trajectory. Raises ``UserError`` for what has another length than the completion.

        Args:
            number: its place among the rows, for its name and for messages.
        """
        ids, count = list(self.completion_ids), len(self.completion_ids)
        by_token = {"logprobs": self.logprobs, "mask": self.mask} | dict(self.columns) | {"advantages": self.advantages}
        for name, values in by_token.items():
            if isinstance(values, Sequence) and len(values) != count:
                raise UserError(f"row {number}: {name} has {len(values)} values, and the completion {count} tokens")
        if not self.prompt_ids or not ids:
            raise UserError(f"row {number}: {'prompt_ids' if ids else 'completion_ids'} is empty")
        segments, begin = [Segment("prompt", list(self.prompt_ids))], 0
        for chosen, run in groupby([True] * count if self.mask is None else map(bool, self.mask)):
            part = slice(begin, begin := begin + len(list(run)))
            columns = {name: values[part] for name, values in self.columns.items() if isinstance(values, Sequence)}
            logprobs = None if self.logprobs is None or not chosen else self.logprobs[part]
            versions = [self.version] * len(ids[part]) if chosen else None
            kind = "action" if chosen else "observation"
            segments.append(Segment(cast(Any, kind), ids[part], logprobs, versions, columns))
        name = f"row-{number}"
        rewards = {} if self.reward is None else {"reward": Reward(self.reward)}
        of_row = {key: value for key, value in self.columns.items() if not isinstance(value, Sequence)}
        group = name if self.group is None else f"group-{self.group}"
        return Trajectory(name, group, Task(""), segments, rewards=dict(rewards), reward=self.reward or 0.0, columns=of_row)
