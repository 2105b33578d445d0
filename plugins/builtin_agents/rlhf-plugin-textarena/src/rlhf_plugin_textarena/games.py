"""Games that are played at the same time: each has its own random numbers."""

from __future__ import annotations

import difflib
import random
import re
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, TypeVar

import numpy as np

from rlhf_host import EpisodeFailed, UserError
from rlhf_plugin_textarena.threads import limited

T = TypeVar("T")

MOST_PLAYERS = 15
BEGIN_S, MOVE_S = 120.0, 20.0
"""Deadlines in seconds for work inside a game, which takes milliseconds: some games loop for ever, as MarketEntryGame does when
all have lost.
"""
MOST_DIGITS = 100
"""Maximum digits of a number. Games read numbers with ``int``, which refuses 5000 digits with an error that is not the game's."""
_ONE = threading.Lock()
"""Lock: one game moves at a time, because TextArena draws from Python's global random numbers, which all games of a process
share.
"""


class Game:
    """A game of TextArena.

    Args:
        sees: ``new``: a player sees the messages since its last move, so a conversation goes on. ``game``: a player sees what
            the game's own wrappers show, mostly the whole game so far.
    """

    def __init__(self, name: str, players: int, seed: int, sees: Literal["new", "game"] = "new"):
        self.name, self.players, self.sees = name, players, sees
        self.first: int | None = None
        """The player who begins, known from the first turn on."""
        self._numbers: Any = None
        self.env = self._alone(lambda: self._begun(seed), BEGIN_S)

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
        """Returns the player whose turn it is, and what that player sees."""
        player, seen = self._alone(self.env.get_observation)
        self.first = int(player) if self.first is None else self.first
        return int(player), seen.strip() if isinstance(seen, str) else self._text(int(player), seen)

    def move(self, text: str) -> bool:
        """Makes a move; returns True if the game is over."""
        text = re.sub(rf"(\d{{{MOST_DIGITS}}})\d+", r"\1", text)
        return bool(self._alone(lambda: self.env.step(text))[0])

    def result(self) -> tuple[Mapping[int, float], Mapping[int, Mapping[str, Any]]]:
        """Returns reward and information, by player."""
        rewards, info = self._alone(self.env.close)
        told = {int(player): dict(one) for player, one in (info or {}).items()}
        paid = {}
        for player, reward in (rewards or {}).items():
            if isinstance(reward, str):  # some games end by a wrong move with its reason in place of its reward
                told.setdefault(int(player), {})["invalid_move"] = True
                reward = 0.0 if self.players == 1 else -1.0
            paid[int(player)] = float(reward)
        return paid, told

    def _text(self, player: int, seen: Any) -> str:
        from textarena.core import ObservationType

        state = self.env.state
        lines = []
        for sender, message, kind in seen or ():
            if sender == player and kind is ObservationType.PLAYER_ACTION:
                continue  # its own words
            lines.append(f"[{state.role_mapping.get(sender, f'Player {sender}')}] {message}")
        return "\n".join(lines).strip()

    def _alone(self, work: Callable[[], T], timeout_s: float | None = None) -> T:
        """Runs a call of the game under the lock. Raises ``EpisodeFailed`` if the game hangs."""
        timeout_s = MOVE_S if timeout_s is None else timeout_s
        with _ONE:
            others = random.getstate(), np.random.get_state()
            if self._numbers is not None:
                random.setstate(self._numbers[0])
                np.random.set_state(self._numbers[1])
            try:
                return limited(work, timeout_s)
            except TimeoutError as error:
                raise EpisodeFailed(f"{self.name} hangs: it took more than {timeout_s:g} s") from error
            finally:
                self._numbers = random.getstate(), np.random.get_state()
                random.setstate(others[0])
                np.random.set_state(others[1])


@lru_cache(maxsize=256)
def fewest_players(name: str) -> int:
    """Returns the game's own number of players if it has one, else the fewest. Raises ``UserError`` if it cannot be played
    here.
    """
    from textarena.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        near = difflib.get_close_matches(name, ENV_REGISTRY, 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; its README lists them"
        raise UserError(f"textarena has no game {name!r}{hint}")
    why = ""
    for players in range(1, MOST_PLAYERS + 1):
        try:
            game = _begun(name, players)
        except AssertionError as error:
            why = str(error)
        except Exception as error:
            # Many games say so of a wrong number; others lack a word list.
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if isinstance(error, LookupError | OSError | ImportError | EpisodeFailed) and not isinstance(
                error, KeyError | IndexError
            ):
                break
        else:
            return int(getattr(game.env, "default_num_players", players))
    raise UserError(f"textarena: {name} cannot be played here: {why}")


@lru_cache(maxsize=256)
def check_players(name: str, players: int) -> None:
    """Raises ``UserError`` if this number of players is not possible."""
    try:
        _begun(name, players)
    except Exception as error:
        raise UserError(f"textarena: {name} is not played by {players}: {' '.join(str(error).split())[:300]}") from error


def _begun(name: str, players: int) -> Game:
    """Begins a game. Raises ``AssertionError`` if this number of players is not possible, and any error of the game. Some games
    begin with a number of players that they do not play with.
    """
    from textarena.state import FFAMultiPlayerState, MinimalMultiPlayerState, TeamMultiPlayerState

    game = Game(name, players, 0)
    game.turn()
    state = game.env.state
    if state.num_players != players:
        raise AssertionError(f"it is played by {state.num_players}")
    if players == 1 and isinstance(state, FFAMultiPlayerState | MinimalMultiPlayerState | TeamMultiPlayerState):
        raise AssertionError("it is played by several")
    return game
