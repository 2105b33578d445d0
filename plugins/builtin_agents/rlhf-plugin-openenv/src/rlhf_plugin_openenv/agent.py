"""An agent that plays environments served by OpenEnv."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import regex
from pydantic import BaseModel, ConfigDict, Field, field_validator

from rlhf_host import Action, Episode, EpisodeFailed, Needs, Outcome, RunContext, Step, UserError, hookimpl
from rlhf_plugin_openenv.actions import action_of, form_of
from rlhf_plugin_openenv.sessions import Refused, Servers, Session

HIDDEN = ("done", "reward", "metadata")
"""Fields of an observation that are not text for the policy."""


@dataclass(slots=True)
class _State:
    session: Session
    turns: int = 0
    invalid: int = 0


class OpenEnv:
    """An episode is one session of an OpenEnv server: its observations become text, and the policy's text becomes its actions."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        url: list[str] = Field(description="addresses of servers, http://HOST:PORT; several are a pool")
        at_once: int = Field(1, ge=1, description="sessions at the same time, for each server; as its max_concurrent_envs")
        action: str = Field(
            "auto",
            description="how an answer becomes an action: a JSON object in which {text} stands for the answer and {int} for the "
            "first number in it; json: the last JSON object in the answer; auto: the action's only field, else json",
        )
        pattern: str | None = Field(
            None, description="what of an answer is {text}: a regular expression, its first group if it has one; default: all"
        )
        observation: str = Field(
            "auto", description="how an observation is told: a text with {FIELD}s; auto: its only field, else all as JSON"
        )
        prompt: str = Field(
            "{prompt}\n{observation}", description="the first message, of the task's prompt and what reset shows"
        )
        reset: list[str] = Field([], description="columns of the data that reset gets, beside the seed")
        max_turns: int = Field(16, ge=1, description="actions per episode")
        on_invalid: Literal["tell", "end"] = Field(
            "tell", description="after an answer that is no action: tell the policy, or end the episode with the reward 0"
        )
        timeout_s: float = Field(60.0, gt=0, description="deadline for a server's answer, in seconds")
        wait_s: float = Field(600.0, gt=0, description="longest time to wait for a free session")

        @field_validator("url", mode="before")
        @classmethod
        def _several(cls, value: Any) -> Any:
            return value.split(",") if isinstance(value, str) else value

    def __init__(self, options: Options):
        self.options = options
        if not options.url:
            raise UserError("openenv: give --agent.url http://HOST:PORT")
        if odd := [url for url in options.url if not re.match(r"https?://\S+$", url)]:
            raise UserError(f"openenv: {odd[0]!r} is no address such as http://127.0.0.1:8000")
        try:
            self.pattern = regex.compile(options.pattern, regex.S) if options.pattern is not None else None
        except (regex.error, RecursionError) as error:
            raise UserError(f"openenv: agent.pattern is no regular expression: {error}") from error
        self.form = form_of(options.action)
        self.servers = Servers(options.url, options.at_once, options.timeout_s, options.wait_s)

    @hookimpl
    def needs(self) -> Needs:
        return Needs(rewards=False)

    @hookimpl
    async def run_started(self, context: RunContext) -> None:
        """Asks every server for its form of actions. Raises ``UserError`` if one does not answer."""
        schemas = await asyncio.gather(*(self.servers.schema(url) for url in self.options.url))
        self.form = form_of(self.options.action, schemas[0])

    @hookimpl
    async def run_finished(self, outcome: Outcome) -> None:
        await self.servers.close()

    @hookimpl
    async def agent_reset(self, episode: Episode) -> Step:
        session = await self.servers.open()
        episode.state = _State(session)
        columns = {name: episode.task.metadata.get(name) for name in self.options.reset}
        told = await session.ask("reset", {"seed": (episode.seed + episode.sample) % 2**31, **columns})
        prompt = episode.task.prompt
        text = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
        seen = self.options.prompt.replace("{prompt}", text).replace("{observation}", self._text(told)).strip()
        return Step(seen if isinstance(prompt, str) else [*prompt[:-1], {**prompt[-1], "content": seen}])

    @hookimpl
    async def agent_step(self, episode: Episode, action: Action) -> Step:
        state: _State = episode.state
        state.turns += 1
        try:
            chosen = await asyncio.to_thread(action_of, self.form, action.text, self.pattern)
            told = await state.session.ask("step", chosen)
        except Refused as refused:
            return self._invalid(state, str(refused), episode)
        reward = told.get("reward")
        done = bool(told.get("done"))
        episode.log("step", observation=told.get("observation"), reward=reward, done=done)
        metrics = {"openenv/turns": float(state.turns), "openenv/invalid": float(state.invalid)}
        ended = done or state.turns == self.options.max_turns
        metrics["openenv/unfinished"] = float(ended and not done)
        step = Step(reward=None if reward is None else float(reward), done=ended, metrics=metrics)
        if ended:
            step.reward = step.reward or 0.0
        else:
            step.observation = self._text(told)
        return step

    def _invalid(self, state: _State, why: str, episode: Episode) -> Step:
        state.invalid += 1
        episode.log("invalid", why=why)
        metrics = {"openenv/turns": float(state.turns), "openenv/invalid": float(state.invalid)}
        if self.options.on_invalid == "end" or state.turns == self.options.max_turns:
            return Step(reward=0.0, done=True, metrics={**metrics, "openenv/unfinished": 1.0})
        return Step(f"This is no valid action: {why}", metrics=metrics)

    @hookimpl
    async def agent_close(self, episode: Episode) -> None:
        if isinstance(episode.state, _State):
            await self.servers.give_back(episode.state.session)

    def _text(self, told: Mapping[str, Any]) -> str:
        """Returns the text of an observation. Raises ``EpisodeFailed`` for a missing field."""
        seen = told.get("observation") or {}
        fields = (
            {name: value for name, value in seen.items() if name not in HIDDEN} if isinstance(seen, Mapping) else {"": seen}
        )
        if self.options.observation == "auto":
            value = next(iter(fields.values())) if len(fields) == 1 else fields
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

        def filled(match: re.Match[str]) -> str:
            if match[1] not in fields:
                raise EpisodeFailed(f"openenv: the observation has no {match[1]!r}; it has {', '.join(fields)}")
            value = fields[match[1]]
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

        return re.sub(r"\{(\w+)\}", filled, self.options.observation)
