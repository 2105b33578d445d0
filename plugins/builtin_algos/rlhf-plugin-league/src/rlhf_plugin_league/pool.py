"""The pool of opponents: its members, how often the policy beats each of them, and who is drawn."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeAlias

Draw: TypeAlias = Literal["pfsp", "uniform", "latest"]


@dataclass(slots=True)
class Record:
    """Games of the policy against one member. With a decay, older games count less."""

    games: float = 0.0
    won: float = 0.0
    """Sum of the scores: 1 won, 0.5 drawn, 0 lost."""

    @property
    def win_rate(self) -> float:
        """Share of games that the policy won; 1/2 before the first one, as AlphaStar has it."""
        return self.won / self.games if self.games else 0.5

    def add(self, score: float, decay: float = 1.0) -> None:
        self.games, self.won = self.games * decay + 1, self.won * decay + score


class Pool:
    """Members in order: the fixed ones, then saved steps, the oldest first.

    Args:
        fixed: names of members that stay.
        size: number of saved steps; where there are more, the oldest leaves.
        decay: weight of earlier games after each new one.
    """

    def __init__(self, fixed: Sequence[str], size: int, decay: float):
        self.fixed, self.size, self.decay = tuple(fixed), size, decay
        self.records: dict[str, Record] = {name: Record() for name in fixed}

    @property
    def saved(self) -> list[str]:
        return [name for name in self.records if name not in self.fixed]

    def add(self, name: str) -> list[str]:
        """Adds a saved step, and returns those that leave."""
        self.records[name] = Record()
        left = self.saved[: -self.size]
        for gone in left:
            del self.records[gone]
        return left

    def note(self, name: str, score: float) -> None:
        """Notes a game against a member. One that has left is forgotten."""
        if name in self.records:
            self.records[name].add(score, self.decay)

    def weights(self, draw: Draw, power: float) -> dict[str, float]:
        """Returns what draws are proportional to: nothing but the newest saved step, all the same, or ``(1 - p)^power`` where the
        policy wins with probability ``p`` (f_hard of Vinyals et al. 2019). If it beats everybody all draws are the same.
        """
        if draw == "latest":
            newest = self.saved[-1:] or self.fixed
            return {name: float(name in newest) for name in self.records}
        if draw == "pfsp":
            hard = {name: (1 - record.win_rate) ** power for name, record in self.records.items()}
            if sum(hard.values()) > 1e-10:
                return hard
        return dict.fromkeys(self.records, 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {name: [record.games, record.won] for name, record in self.records.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Takes members and records back; fixed members that the state does not have begin without games."""
        kept = {name: Record(*values) for name, values in state.items()}
        fixed = {name: kept.pop(name, Record()) for name in self.fixed}
        self.records = fixed | kept


def drawn(weights: Mapping[str, float], count: int, start: float) -> list[str]:
    """Returns ``count`` names by systematic sampling: over ``start``, uniform in [0, 1), a name comes ``count·w`` times on average,
    where ``w`` is its share of the weights, and never more than one time more or less.
    """
    names, limits = list(weights), list(accumulate(weights.values()))
    points = (limits[-1] * (start + place) / count for place in range(count))
    last = max(place for place, weight in enumerate(weights.values()) if weight > 0)
    return [names[min(bisect(limits, point), last)] for point in points]
