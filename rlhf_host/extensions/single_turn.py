"""The default agent: one question, one answer."""

from __future__ import annotations

from pydantic import BaseModel

from rlhf_host.hookspecs import hookimpl
from rlhf_host.records.episodes import Action, Episode, Step


class SingleTurn:
    """One question, one answer: shows the task's own prompt and ends with the first answer."""

    def __init__(self, options: BaseModel):
        self.options = options

    # Coroutines: thousands of these a step would only queue for threads otherwise.

    @hookimpl
    async def agent_reset(self, episode: Episode) -> Step:
        return Step(observation=None)

    @hookimpl
    async def agent_step(self, episode: Episode, action: Action) -> Step:
        return Step(done=True)
