"""Games as they are played side by side: each has its own random numbers."""

from __future__ import annotations

import difflib
import random
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, TypeVar

import numpy as np

from rlhf_host import UserError

T = TypeVar("T")

MOST_PLAYERS = 15
_ONE = threading.Lock()
"""TextArena draws from Python's global random numbers, which all games of a process share: one game moves at a time."""


class Game:
    """A game of TextArena.

    Args:
        sees: ``new``: a player is shown what was said since its last move, so a conversation goes on. ``game``: what the game's own
            wrappers show, mostly the whole game so far.
    """

    def __init__(self, name: str, players: int, seed: int, sees: Literal["new", "game"] = "new"):
        self.name, self.players, self.sees = name, players, sees
        self._numbers: Any = None
        self.env = self._alone(lambda: self._begun(seed))

    def _begun(self, seed: int) -> Any:
        import textarena
        from textarena.core import ActionWrapper, Wrapper

        random.seed(seed)
        np.random.seed(seed % 2**32)
        env = textarena.make(self.name)
        if self.sees == "new":
            wrappers = []
            while isinstance(env, Wrapper):
                wrappers.append(type(env))
                env = env.env
            for wrapper in reversed(wrappers):
                env = wrapper(env) if issubclass(wrapper, ActionWrapper) else env
        env.reset(num_players=self.players, seed=seed)
        return env

    def turn(self) -> tuple[int, str]:
        """Whose turn it is, and what that player sees."""
        player, seen = self._alone(self.env.get_observation)
        return int(player), seen.strip() if isinstance(seen, str) else self._text(int(player), seen)

    def move(self, text: str) -> bool:
        """Whether the game is over."""
        return bool(self._alone(lambda: self.env.step(text))[0])

    def result(self) -> tuple[Mapping[int, float], Mapping[int, Mapping[str, Any]]]:
        """Reward, and what is known, by player."""
        rewards, info = self._alone(self.env.close)
        return {int(player): float(reward) for player, reward in (rewards or {}).items()}, info or {}

    def _text(self, player: int, seen: Any) -> str:
        from textarena.core import ObservationType

        state = self.env.state
        lines = []
        for sender, message, kind in seen or ():
            if sender == player and kind is ObservationType.PLAYER_ACTION:
                continue  # its own words
            lines.append(f"[{state.role_mapping.get(sender, f'Player {sender}')}] {message}")
        return "\n".join(lines).strip()

    def _alone(self, work: Callable[[], T]) -> T:
        with _ONE:
            others = random.getstate(), np.random.get_state()
            if self._numbers is not None:
                random.setstate(self._numbers[0])
                np.random.set_state(self._numbers[1])
            try:
                return work()
            finally:
                self._numbers = random.getstate(), np.random.get_state()
                random.setstate(others[0])
                np.random.set_state(others[1])


@lru_cache(maxsize=256)
def fewest_players(name: str) -> int:
    """How many at least play a game. Raises ``UserError`` where it cannot be played here."""
    from textarena.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        near = difflib.get_close_matches(name, ENV_REGISTRY, 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; its README lists them"
        raise UserError(f"textarena has no game {name!r}{hint}")
    why = ""
    for players in range(1, MOST_PLAYERS + 1):
        try:
            Game(name, players, 0).turn()
        except AssertionError as error:
            why = str(error)
        except Exception as error:
            # Many games say so of a wrong number; others lack a word list.
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if isinstance(error, LookupError | OSError | ImportError) and not isinstance(error, KeyError | IndexError):
                break
        else:
            return players
    raise UserError(f"textarena: {name} cannot be played here: {why}")


def check_players(name: str, players: int) -> None:
    """Raises ``UserError`` where so many cannot play."""
    try:
        Game(name, players, 0).turn()
    except Exception as error:
        raise UserError(f"textarena: {name} is not played by {players}: {' '.join(str(error).split())[:300]}") from error
