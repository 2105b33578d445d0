"""An episode is one ``POST /run``; its tokens come from the policy's own log of calls."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any, Literal

import aiohttp
from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import AgentNeeds, Episode, EpisodeFailed, Outcome, Policy, RunContext, Trajectory, UserError, hookimpl
from rlhf_plugin_nemo_gym.answers import check_tokens, read_answer
from rlhf_plugin_nemo_gym.rows import PARAMS
from rlhf_plugin_nemo_gym.servers import Gym, Servers

RETRYABLE = (408, 429)
"""HTTP statuses below 500 that may not occur in another attempt."""
FULL = "nemo_gym: rollout.max_tokens is full, so the environment could not go on"


class NemoGym:
    """Environments of NeMo Gym: their servers ask the policy, call tools and verify."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        attach: str | None = Field(None, description="URL of the head server of servers that run already")
        configs: list[str] = Field(
            [],
            description="instead: Gym's configuration files, to start servers of; relative to here or to the package nemo-gym",
        )
        python: str | None = Field(None, description="Python of an environment with nemo-gym, to start servers with")
        gym_agent: str | None = Field(
            None, description="Gym's agent for rows without agent_ref; default: the only one there is"
        )
        overrides: list[str] = Field(
            [], description="settings for Gym, such as ++my_agent.responses_api_agents.simple_agent.x=1"
        )
        env: list[str] = Field([], description="names of environment variables to pass on to the servers")
        max_steps: int = Field(16, ge=1, description="calls of the policy per episode, where Gym's configuration sets no bound")
        at_once: int = Field(64, ge=1, description="episodes that run at the same time")
        run_timeout_s: float = Field(1800.0, gt=0, description="deadline for one episode at Gym")
        start_timeout_s: float = Field(120.0, gt=0, description="deadline for the servers to answer")
        hidden_calls: Literal["fail", "train"] = Field(
            "fail",
            description="answers of the policy that the environment's response does not have: fail the episode, or train",
        )

    def __init__(self, options: Options):
        self.options = options
        if (options.attach is None) == (not options.configs):
            raise UserError("nemo_gym: give --agent.attach URL or --agent.configs FILE,... with --agent.python PYTHON")
        if options.configs and options.python is None:
            raise UserError("nemo_gym: --agent.configs needs --agent.python, the Python of an environment with nemo-gym")
        if options.attach is not None and not options.attach.startswith(("http://", "https://")):
            raise UserError(f"nemo_gym: --agent.attach {options.attach}: give a URL, such as http://127.0.0.1:11000")
        self.servers = Servers(
            "nemo_gym",
            options.attach,
            options.configs,
            options.python,
            options.overrides,
            options.env,
            options.max_steps,
            options.start_timeout_s,
        )
        self._slots = asyncio.Semaphore(options.at_once)

    @hookimpl
    def needs(self) -> AgentNeeds:
        return AgentNeeds(rewards=False, server=True)

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        self.servers.check()
        if context.run_dir is not None:
            self.servers.log_file = context.run_dir / "nemo-gym.log"

    @hookimpl
    async def run_finished(self, outcome: Outcome) -> None:
        await self.servers.close()

    @hookimpl
    async def agent_run(self, episode: Episode, policy: Policy) -> list[Trajectory]:
        row = episode.task.metadata
        if not isinstance(row.get(PARAMS), Mapping):
            raise UserError(
                f"nemo_gym: task {episode.task.source}:{episode.task.index} is no row of NeMo Gym: "
                "give --data nemo_gym --data.nemo_gym.file FILE"
            )
        endpoint = await policy.endpoint()
        async with self._slots:
            gym = await self.servers.ready(endpoint.shared_url)
            began = time.monotonic()
            body = await self._post(gym, self._url(gym, row), _named(row, endpoint.token), endpoint)
        answer = read_answer(body, row)
        for tool in answer.tools:
            episode.log("tool", **tool)
        episode.log("nemo_gym", reward=answer.reward, s=round(time.monotonic() - began, 4))
        rows = policy.trajectories()
        if not rows:
            raise EpisodeFailed(_no_calls(endpoint, bool(answer.calls)))
        check_tokens(answer, rows, extra=self.options.hidden_calls == "train")
        for one in rows:
            if one.final:
                one.metrics = answer.metrics
                if endpoint.truncated:
                    one.finish_reason, one.unjudged_reason = "length", FULL
                elif answer.reward is None:
                    one.unjudged_reason = f"nemo_gym: the environment's reward is {json.dumps(body.get('reward'))[:40]}"
                else:
                    one.agent_rewards = [None] * (len(one.actions) - 1) + [answer.reward]
                    one.score = answer.reward if 0.0 <= answer.reward <= 1.0 else None
        return rows

    def _url(self, gym: Gym, row: Mapping[str, Any]) -> str:
        named = row.get("agent_ref")
        name = named.get("name") if isinstance(named, Mapping) else None
        name = name or self.options.gym_agent or (next(iter(gym.agents)) if len(gym.agents) == 1 else None)
        if name is None or name not in gym.agents:
            wanted = f"there is no agent {name!r}" if name else "the row has no agent_ref: give --agent.gym-agent"
            raise UserError(f"nemo_gym: {wanted}; Gym's servers have {', '.join(gym.agents)}")
        return f"{gym.agents[name]}/run"

    async def _post(self, gym: Gym, url: str, body: Mapping[str, Any], endpoint: Any) -> Mapping[str, Any]:
        """Returns the answer of ``/run``, unless the deadline, the servers' end or the engine's comes first."""
        asking = asyncio.ensure_future(self._ask(url, body))
        gone = asyncio.ensure_future(gym.gone.wait())
        try:
            while not asking.done():
                await asyncio.wait([asking, gone], timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                if endpoint.lost is not None:  # Gym would ask without end; the host raises the error itself
                    raise EpisodeFailed("the engine is lost")
                if gone.done() and not asking.done():
                    raise EpisodeFailed("a server of NeMo Gym died", retryable=True)
            return asking.result()
        finally:
            for task in (asking, gone):
                task.cancel()
            await asyncio.wait([asking, gone])

    async def _ask(self, url: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        timeout = aiohttp.ClientTimeout(total=self.options.run_timeout_s)
        try:
            async with self.servers.http.post(url, json=body, timeout=timeout) as response:
                status, raw = response.status, await response.read()
        except TimeoutError as error:
            reason = f"no answer of /run in {self.options.run_timeout_s:g} s (--agent.run-timeout-s)"
            raise EpisodeFailed(reason, retryable=True) from error
        except aiohttp.ClientError as error:
            raise EpisodeFailed(f"/run cannot be reached: {type(error).__name__}: {error}", retryable=True) from error
        if status != 200:
            shown = " ".join(raw[:2000].decode("utf-8", "replace").split())[:300]
            raise EpisodeFailed(f"/run answered {status}: {shown}", retryable=status >= 500 or status in RETRYABLE)
        answer = None
        with contextlib.suppress(ValueError):
            answer = json.loads(raw)
        if not isinstance(answer, dict):
            raise EpisodeFailed("/run answered something else than a JSON object", retryable=True)
        return answer


def _named(row: Mapping[str, Any], token: str) -> dict[str, Any]:
    """Returns the row with the episode's name in its parameters, which go into every request to the policy."""
    params = row[PARAMS]
    return {**row, PARAMS: {**params, "metadata": {**(params.get("metadata") or {}), "rlhf_episode": token}}}


def _no_calls(endpoint: Any, answered: bool) -> str:
    if endpoint.truncated:
        return "the prompt leaves no room: rollout.max_tokens is full"
    if answered:
        return (
            "Gym's agent does not pass the row's metadata on to the model server, so its calls cannot be told apart: its tokens"
            " are in the response, but not in the policy's log"
        )
    return "the environment never asked the policy, or each of its requests was refused"
