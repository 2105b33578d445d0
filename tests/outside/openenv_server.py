"""A guessing game served by the real ``openenv-core``: ``python openenv_server.py PORT SESSIONS``."""

import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Told(Observation):
    hint: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(step_count=0)
        self._number = 0

    def reset(self, seed=None, episode_id=None, **_):
        self._state = State(episode_id=episode_id, step_count=0)
        self._number = random.Random(seed).randrange(10)
        return Told(hint="0-9?")

    def step(self, action, timeout_s=None, **_):
        self._state.step_count += 1
        if action.number == 77:
            raise RuntimeError("the game broke")
        right = action.number == self._number
        hint = "right" if right else "higher" if action.number < self._number else "lower"
        return Told(hint=hint, reward=float(right), done=right)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    port, sessions = map(int, sys.argv[1:])
    app = create_fastapi_app(Game, Guess, Told, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
