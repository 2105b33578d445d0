"""Tasks: games by name and seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rlhf_host import Task, UserError, hookimpl
from rlhf_plugin_textarena.games import fewest_players

HELD_OUT = 1 << 30
"""Added to the seeds of held-out games."""


class TextArenaTasks:
    """Games of one name or several, in turns."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        games: list[str] = Field(description="names of games, with commas between: TicTacToe-v0,Nim-v0")
        size: int = Field(1000, ge=1, description="training tasks")
        eval_size: int = Field(100, ge=1, description="held-out tasks")
        prompt: str = Field(
            "Play the game. Put your move into [square brackets].", description="text before what a player sees first"
        )

        @field_validator("games", mode="before")
        @classmethod
        def _several(cls, value: Any) -> Any:
            return value.split(",") if isinstance(value, str) else value

    def __init__(self, options: Options):
        self.options = options
        if not options.games:
            raise UserError("textarena: name games, as --data.textarena.games TicTacToe-v0")

    @hookimpl
    def load_tasks(self, split: str, seed: int) -> Sequence[Task]:
        games = self.options.games
        for name in games:
            fewest_players(name)
        count = self.options.size if split == "train" else self.options.eval_size
        first = HELD_OUT if split == "eval" else 0
        return [
            Task(self.options.prompt, metadata={"textarena": {"game": games[i % len(games)], "seed": first + i}})
            for i in range(count)
        ]
