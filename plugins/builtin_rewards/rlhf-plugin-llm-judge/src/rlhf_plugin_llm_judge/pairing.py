"""Who meets whom in a tournament, and what the games say of each player."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

Pair = tuple[int, int]
Games = Mapping[Pair, float]
"""Pair → share of the first one's wins in their games; a tie is one half."""

PRIOR = 1.0
"""Ties of every player with one of strength 1, so that strengths are finite where one won or lost all."""


def all_pairs(players: int) -> list[Pair]:
    return [(first, second) for first in range(players) for second in range(first + 1, players)]


def swiss_pairs(players: int, games: Games, rng: random.Random) -> list[Pair]:
    """Returns a round's pairs: neighbours by points who have not met; some are left over if all others were met."""
    points, played = [0.0] * players, [0] * players
    for (first, second), won in games.items():
        points[first] += won
        points[second] += 1 - won
        played[first] += 1
        played[second] += 1
    luck = [rng.random() for _ in range(players)]
    waiting = sorted(range(players), key=lambda player: (-points[player], played[player], luck[player]))
    pairs: list[Pair] = []
    while len(waiting) > 1:
        first = waiting.pop(0)
        met = (other for other in waiting if (min(first, other), max(first, other)) not in games)
        if (second := next(met, None)) is not None:
            waiting.remove(second)
            pairs.append((min(first, second), max(first, second)))
    return pairs


def win_shares(players: int, games: Games) -> list[list[float]]:
    """Returns ``[i][j]``, the chance that ``i`` beats ``j``: what was played, else the share of ``i`` in all its games."""
    shares = [_mean([_won(pair, won, player) for pair, won in games.items() if player in pair]) for player in range(players)]
    return [[_chance(games, one, other, shares[one]) for other in range(players)] for one in range(players)]


def bradley_terry(players: int, games: Games, sweeps: int = 1000) -> list[list[float]]:
    """Returns ``[i][j]``, the chance ``p_i/(p_i+p_j)`` that ``i`` beats ``j`` in the model of Bradley and Terry (1952), fitted by
    Hunter's minorisation (2004).
    """
    strengths = [1.0] * players
    for _ in range(sweeps):
        before = list(strengths)
        for player in range(players):
            won, weight = PRIOR / 2, PRIOR / (strengths[player] + 1)
            for (first, second), share in games.items():
                if player in (first, second):
                    won += share if player == first else 1 - share
                    weight += 1 / (strengths[first] + strengths[second])
            strengths[player] = won / weight
        if max(abs(new / old - 1) for new, old in zip(strengths, before, strict=True)) < 1e-9:
            break
    return [[one / (one + other) for other in strengths] for one in strengths]


def mean_chance(chances: Sequence[Sequence[float]], copies: Sequence[int]) -> list[float]:
    """Returns the mean chance of each player against all other answers, where ``copies`` of its own are ties."""
    others = sum(copies) - 1
    return [
        (sum(count * chance for count, chance in zip(copies, row, strict=True)) - row[player]) / others
        for player, row in enumerate(chances)
    ]


def _won(pair: Pair, share: float, player: int) -> float:
    return share if player == pair[0] else 1 - share


def _chance(games: Games, one: int, other: int, share: float) -> float:
    if one == other:
        return 0.5
    if (one, other) in games:
        return games[one, other]
    return 1 - games[other, one] if (other, one) in games else share


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.5
