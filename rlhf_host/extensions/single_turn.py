"""The default agent: one question, one answer."""

from __future__ import annotations

from pydantic import BaseModel

from rlhf_host.hookspecs import hookimpl
from rlhf_host.records.episodes import Action, Episode, Step


class SingleTurn:
    """Shows the task's own prompt and ends with the first answer; rewards come from reward plugins."""

    asks_once = True
    """The hooks below show the task's prompt and end, so the host does that itself, for a whole group at once, and calls neither.
    Only for classes of the host: what it leaves out is not part of the agents' contract."""

    def __init__(self, options: BaseModel):
        self.options = options

    # Coroutines: thousands of these a step would only queue for threads otherwise.

    @hookimpl
    async def agent_reset(self, episode: Episode) -> Step:
        return Step(observation=None)

    @hookimpl
    async def agent_step(self, episode: Episode, action: Action) -> Step:
        return Step(done=True)
