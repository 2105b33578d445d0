"""An episode is one of the environment; its tokens come from the policy's own log of calls."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import AgentNeeds, Episode, EpisodeFailed, Outcome, Policy, RunContext, Trajectory, UserError, hookimpl
from rlhf_plugin_verifiers.process import Place, Workers
from rlhf_plugin_verifiers.rows import ROW

log = logging.getLogger(__name__)


class Verifiers:
    """Environments of verifiers: they ask the policy, run tools and compute the reward, in their own process."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        environment: str = Field(description="name of an environment (a taskset) that its Python can import, or a .py file")
        python: str = Field(description="Python of an environment with verifiers")
        args: str = Field("{}", description='its configuration, as JSON: {"taskset": {...}, "agent": {"max_turns": 4}}')
        env: list[str] = Field([], description="names of environment variables to pass on, such as keys of a judge")
        at_once: int = Field(16, ge=1, description="episodes that a worker plays at the same time")
        max_workers: int = Field(1, ge=1, description="processes that play")
        timeout_s: float = Field(1800.0, gt=0, description="deadline for one episode")
        start_timeout_s: float = Field(600.0, gt=0, description="deadline for a worker to load the environment")

    def __init__(self, options: Options):
        self.options = options
        place = Place("--agent", options.python, options.environment, options.args, options.env)
        self.workers = Workers(place, options.max_workers, options.at_once, options.start_timeout_s)
        self.scores = True
        """False once a reward was outside [0, 1]: a mean of scores over the other episodes alone would fall as rewards rise."""

    @hookimpl
    def needs(self) -> AgentNeeds:
        return AgentNeeds(rewards=False, episodes_at_once=self.options.at_once * self.options.max_workers, server=True)

    @hookimpl
    async def run_started(self, context: RunContext) -> None:
        """Starts the environment. Raises ``UserError`` for one that cannot be loaded."""
        self.workers.open(context.run_dir)
        await self.workers.ready()

    @hookimpl
    async def run_finished(self, outcome: Outcome) -> None:
        await self.workers.close()

    @hookimpl
    async def agent_run(self, episode: Episode, policy: Policy) -> list[Trajectory]:
        row = episode.task.metadata.get(ROW)
        if not isinstance(row, Mapping):
            raise UserError(
                f"verifiers: task {episode.task.source}:{episode.task.index} is no task of verifiers: "
                "give --data verifiers --data.verifiers.environment NAME"
            )
        endpoint = await policy.endpoint()
        began = time.monotonic()
        told = await self._played(row, endpoint)
        reward, why = _reward(told)
        score = self._score(told)
        episode.log(
            "verifiers", **{name: told.get(name) for name in ("rewards", "stop", "error")}, s=round(time.monotonic() - began, 4)
        )
        _check(told)
        rows = policy.trajectories()
        if not rows:
            full = "the prompt leaves no room: rollout.max_tokens is full"
            raise EpisodeFailed(
                full if endpoint.truncated else "the environment never asked the policy, or each of its requests was refused"
            )
        for one in rows:
            if one.final:
                one.metrics = _metrics(told)
                if endpoint.truncated:
                    one.finish_reason = "length"
                if reward is None:
                    one.unjudged_reason = f"verifiers: {why}"
                else:
                    one.agent_rewards = [None] * (len(one.actions) - 1) + [reward]
                    one.score = score
        return rows

    def _score(self, told: Mapping[str, Any]) -> float | None:
        """Returns the position of the reward between the lowest and the highest that its weights allow, for rewards in [0, 1]."""
        parts = list((told.get("parts") or {}).values())
        if not self.scores or not parts or not all(part and all(map(math.isfinite, part)) for part in parts):
            return None
        if not all(0.0 <= value <= 1.0 for value, _ in parts):
            log.info("verifiers: a reward of the environment is outside [0, 1], so its episodes have no score")
            self.scores = False
            return None
        low, high = (sum(side(0.0, weight) for _, weight in parts) for side in (min, max))
        return (sum(value * weight for value, weight in parts) - low) / (high - low) if high > low else None

    async def _played(self, row: Mapping[str, Any], endpoint: Any) -> dict[str, Any]:
        """Returns the environment's answer, unless the engine's end comes first."""
        asked = self.workers.play(self.options.timeout_s, data=row, base_url=endpoint.base_url)
        playing = asyncio.ensure_future(asked)
        try:
            while not playing.done():
                await asyncio.wait([playing], timeout=1.0)
                if endpoint.lost is not None:  # the host raises the error itself
                    raise EpisodeFailed("the engine is lost")
            return playing.result()
        finally:
            playing.cancel()
            await asyncio.wait([playing])


def _check(told: Mapping[str, Any]) -> None:
    """Raises an error for an episode that the environment could not play."""
    if told.get("late"):
        raise EpisodeFailed(f"a deadline of the environment's own: {told['late']}", retryable=True)
    if not told.get("ok"):
        error = told.get("error") or {"type": "the environment", "message": "says no reason"}
        status = error.get("status") or 500
        shown = " ".join(f"{error['type']}: {error['message']}".split())[:500]
        raise EpisodeFailed(shown, retryable=status >= 500 or status in (408, 429))
    if [trains for _, trains in told["agents"]] != [True]:
        names = ", ".join(f"{name or 'agent'}{'' if trains else ' (not to be trained)'}" for name, trains in told["agents"])
        raise UserError(
            f"verifiers: in an episode the policy plays {names or 'nobody'}: it can play one agent that trains; give the others a"
            ' model of their own, as in --agent.args \'{"judge": {"model": "...", "client": {"base_url": "..."}}}\''
        )


def _reward(told: Mapping[str, Any]) -> tuple[float | None, str]:
    """Returns the reward, or the reason for having none."""
    rewards = told.get("rewards") or {}
    if not rewards:
        return None, "the environment gives no reward"
    if missing := [name for name, value in rewards.items() if not isinstance(value, int | float) or not math.isfinite(value)]:
        return None, f"the environment's reward {missing[0]} is {rewards[missing[0]]}"
    return float(sum(rewards.values())), ""


def _metrics(told: Mapping[str, Any]) -> dict[str, float]:
    parts = {
        **(told.get("rewards") or {}),
        **(told.get("metrics") or {}),
        "turns": told["turns"],
        "truncated": told["truncated"],
    }
    return {
        f"verifiers/{name}": float(value)
        for name, value in parts.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
