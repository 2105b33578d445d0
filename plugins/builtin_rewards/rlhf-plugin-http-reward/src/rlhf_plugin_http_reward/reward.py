"""The reward ``http_reward``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rlhf_host import Outcome, Reward, RunContext, ScoreContext, Trajectory, Unjudged, UserError, hookimpl
from rlhf_plugin_http_reward.servers import Servers


class HttpReward:
    """Servers judge: ``--reward http://HOST:PORT/PATH[,...]``."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        urls: list[str] = Field([], description="addresses, with commas between; whole groups are spread over them")
        at_once: int = Field(16, ge=1, description="open requests of one server")
        timeout_s: float = Field(180.0, gt=0, description="deadline for an answer, in seconds")
        tries: int = Field(3, ge=1, description="requests in all, where a server is not reached, busy or failing")
        key_env: str | None = Field(None, description="environment variable with a key, sent as Authorization: Bearer")

        @field_validator("urls", mode="before")
        @classmethod
        def _several(cls, value: Any) -> Any:
            return value.split(",") if isinstance(value, str) else value

    def __init__(self, options: Options):
        self.options = options
        if not options.urls:
            raise UserError("http_reward: give an address, as in --reward http://127.0.0.1:5000/get_reward")
        for url in options.urls:
            if not _is_address(url):
                raise UserError(f"http_reward: {url!r} is no address; write http://HOST:PORT/PATH")
        key = None
        if options.key_env is not None and not (key := os.environ.get(options.key_env)):
            raise UserError(f"http_reward: the environment variable {options.key_env} (key_env) is not set")
        self.servers = Servers(options.urls, at_once=options.at_once, timeout_s=options.timeout_s, tries=options.tries, key=key)

    @hookimpl
    async def run_started(self, context: RunContext) -> None:
        """Checks the servers. Raises ``UserError`` if one does not answer."""
        await self.servers.check()

    @hookimpl
    async def run_finished(self, outcome: Outcome) -> None:
        await self.servers.close()

    @hookimpl
    async def score(self, trajectories: Sequence[Trajectory], context: ScoreContext) -> list[Reward | Unjudged]:
        def text(trajectory: Trajectory, ids: Sequence[int]) -> str:
            if context.tokenizer is None:
                return trajectory._text(ids)
            return str(context.tokenizer.decode(list(ids), skip_special_tokens=False))

        body = {
            "query": [text(row, [token for part in row.segments for token in part.token_ids]) for row in trajectories],
            "prompts": [text(row, row.prompt_ids) for row in trajectories],
            "labels": [row.task.ground_truth for row in trajectories],
        }
        return await self.servers.ask(body, len(trajectories))


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
