"""Rows to train on, in the simplest form: token ids, and what is known of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, cast

import numpy as np

from rlhf_host import Reward, Segment, Task, Trajectory, UserError
from rlhf_host.internals import AGENT


@dataclass(slots=True, kw_only=True)
class TrainingRow:
    """A row to train on, as ``TrainableSession.generate`` returns it, or made by hand. ``T`` is its number of completion tokens.
    What is a list here may be an array or a tensor, too.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float | None] | None = None
    """``[T]``: of the tokens, by the engine that sampled them; None, or None or NaN for single tokens: unknown."""
    mask: Sequence[bool | int] | None = None
    """``[T]``: false for tokens that the policy did not choose, such as those of a tool's answer; None: it chose all."""
    advantages: float | Sequence[float] | None = None
    """One for all tokens, or ``[T]``; None: the algorithm's, from the rewards, or none."""
    reward: float | None = None
    group: Any = None
    """Rows with one value are answers to one prompt; None: the row is alone."""
    columns: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    """A number becomes ``batch.columns[name]``, ``[T]`` becomes ``batch.token_columns[name]``. All rows of a call have the same.
    They are finite; those of tokens that the policy did not choose may be unknown, and are 0 then."""
    version: int = 0
    """Version of the weights that sampled it."""
    temperature: float | None = None
    """At which it was sampled, and at which its probabilities are computed; None: as configured."""
    truncated: bool = False
    """The completion was cut off at the limit of tokens."""
    text: str = ""
    """The completion as text, for its reader."""
    traces: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What the engine told beside, as in a ``Generation``: with ``top_p``, ``top_k`` or ``min_p``, which tokens could be drawn."""

    def trajectory(self, number: int) -> Trajectory:
        """Returns it as a trajectory. Raises ``UserError`` for what has another type or length.

        Args:
            number: its place among the rows, for its name and for messages.
        """
        prompt, ids = (_token_ids(getattr(self, name), number, name) for name in ("prompt_ids", "completion_ids"))
        count, mask = len(ids), [True] * len(ids)
        if self.mask is not None:
            values = _numbers(self.mask, number, "mask", count)
            if not isinstance(values, list) or not set(values) <= {0.0, 1.0}:
                raise UserError(f"row {number}: mask has one of true and false, or 1 and 0, for each completion token")
            mask = [value == 1.0 for value in values]
        logprobs = None
        if self.logprobs is not None:
            logprobs = _numbers(self.logprobs, number, "logprobs", count)
            if not isinstance(logprobs, list):
                raise UserError(f"row {number}: logprobs is one number, and the completion has {count} tokens")
            known = [value for value, chosen in zip(logprobs, mask, strict=True) if chosen]
            if (odd := next((value for value in known if value > TOLERANCE or value < -LARGEST), None)) is not None:
                raise UserError(f"row {number}: {odd:g} is no log-probability of a sampled token")
        if not isinstance(self.columns, Mapping):
            raise UserError(f"row {number}: columns is a mapping of names, not {type(self.columns).__name__}")
        columns = {name: _column(values, number, name, mask) for name, values in self.columns.items()}
        if not isinstance(self.version, int) or isinstance(self.version, bool) or self.version < 0:
            raise UserError(f"row {number}: version is {self.version!r}, and should be a whole number from 0")
        if not isinstance(self.truncated, bool | np.bool):
            raise UserError(f"row {number}: truncated is {self.truncated!r}, and should be true or false")
        segments, begin = [Segment("prompt", prompt)], 0
        for chosen, run in groupby(mask):
            part = slice(begin, begin := begin + len(list(run)))
            by_token = {name: values[part] for name, values in columns.items() if isinstance(values, list)}
            own = logprobs[part] if chosen and isinstance(logprobs, list) else None
            versions = [self.version] * len(ids[part]) if chosen else None
            segments.append(Segment(cast(Any, "action" if chosen else "observation"), ids[part], own, versions, by_token))
        name, reward = f"row-{number}", self._reward(number)
        of_row = {key: value for key, value in columns.items() if not isinstance(value, list)}
        group = self.group.item() if isinstance(self.group, np.generic) else self.group
        return Trajectory(
            name,
            name if group is None else f"group-{group!r}",
            Task(""),
            segments,
            finish_reason="length" if self.truncated else "stop",
            rewards={} if reward is None else {"reward": Reward(reward)},
            reward=0.0 if reward is None else reward,
            columns=of_row,
            traces=self.traces,
        )

    def known_advantages(self, number: int, count: int) -> float | list[float] | None:
        """Returns the advantages as numbers. Raises ``UserError`` for those that are none, or of another length."""
        values = self.advantages
        return None if values is None else _held(_numbers(values, number, "advantages", count), number, "advantages")

    def _reward(self, number: int) -> float | None:
        value = None if self.reward is None else _numbers(self.reward, number, "reward", 1)
        if value is not None and (isinstance(value, list) or not math.isfinite(value)):
            raise UserError(f"row {number}: reward is {self.reward!r}, and should be a finite number")
        return value


TOLERANCE = 1e-3
"""Most that rounding may add to a log-probability of 0."""


def own_trajectory(row: Trajectory, number: int, weights: Mapping[str, float] | None = None) -> Trajectory:
    """Returns a copy of a trajectory of an earlier run, in which training may write. Without the weights of its rewards these are
    such that their sum is the reward of the row.

    Raises ``UserError`` for one without a completion, and for rewards whose weights are unknown.
    """
    if not row.prompt_ids or not row.completion:
        raise UserError(f"row {number}: {'the completion' if row.prompt_ids else 'the prompt'} is empty")
    judged = {alias: reward for alias, reward in row.rewards.items() if reward is not None}
    if weights is not None:
        return replace(row)
    if row.reward is None or math.isclose(sum(own.total for own in judged.values()), row.reward, abs_tol=1e-9):
        return replace(row)
    if len(placed := [own for own in judged.values() if own.tokens is not None or own.turns is not None]) > 0:
        raise UserError(
            f"row {number}: {len(placed)} of its rewards are of single tokens or turns, and their weights are unknown: let one"
            " reward be its only one, or give rows with advantages"
        )
    agent = {AGENT: judged[AGENT]} if AGENT in judged else {}
    rest = row.reward - sum(own.total for own in agent.values())
    return replace(row, rewards={"reward": Reward(rest), **agent})


def _token_ids(values: Any, number: int, name: str) -> list[int]:
    try:
        ids = np.asarray(_listed(values))
    except ValueError:  # of rows with different lengths
        ids = np.zeros((0, 0))
    if ids.ndim == 1 and not len(ids):
        raise UserError(f"row {number}: {name} is empty")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UserError(f"row {number}: {name} is a list of token ids, which are whole numbers, not {_short(values)}")
    return cast(list[int], ids.tolist())


def _numbers(values: Any, number: int, name: str, count: int) -> float | list[float]:
    """Returns a number, or a list of one for each of ``count`` tokens; None in it is NaN."""
    try:
        array = np.asarray(_listed(values))
        numbers = array.astype(np.float64) if array.dtype.kind in "biufO" else None
    except (ValueError, TypeError):
        numbers = None
    if numbers is None or numbers.ndim > 1:
        raise UserError(f"row {number}: {name} is a number, or a list with one for each completion token, not {_short(values)}")
    if numbers.ndim and len(numbers) != count:
        raise UserError(f"row {number}: {name} has {len(numbers)} values, and the completion {count} tokens")
    return cast("float | list[float]", numbers.tolist())


def _column(values: Any, number: int, name: str, mask: Sequence[bool]) -> float | list[float]:
    """Returns a column's numbers, 0 for those that are unknown at tokens which the policy did not choose."""
    if not isinstance(name, str) or not name:
        raise UserError(f"row {number}: a column is called {name!r}, and names are texts")
    found = _numbers(values, number, f"the column {name}", len(mask))
    if isinstance(found, list):
        found = [value if chosen or math.isfinite(value) else 0.0 for value, chosen in zip(found, mask, strict=True)]
    return _held(found, number, f"the column {name}")


def _held(found: float | list[float], number: int, name: str) -> float | list[float]:
    """Returns the numbers. Raises ``UserError`` for those that batches, which are float32, cannot hold."""
    for value in found if isinstance(found, list) else [found]:
        if not abs(value) <= LARGEST:
            raise UserError(f"row {number}: {name} has {value:g}, and should have finite numbers of float32")
        if value.is_integer() and (rounded := float(np.float32(value))) != value:
            raise UserError(f"row {number}: {name} has {value:.0f}, and float32 would make {rounded:.0f} of it")
    return found


LARGEST = float(np.finfo(np.float32).max)
"""Largest number of float32."""


def _listed(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def _short(values: Any) -> str:
    text = repr(values)
    return text if len(text) < 60 else f"{text[:57]}..."
