"""One episode: an agent and the policy taking turns, token in, token out."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from rlhf_host.config.schema import DataConfig
from rlhf_host.data.chat import observation_ids, render_prompt
from rlhf_host.engines.protocol import Engine
from rlhf_host.errors import RunError, UserError
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.episodes import (
    Action,
    Episode,
    EpisodeFailed,
    Generation,
    SampleKey,
    Sampling,
    Segment,
    Step,
    Task,
    Trajectory,
)

SHORT = 256
"""Tokens of a text that is kept once it was decoded: 4,096 of them are a few megabytes."""


def episode_seed(seed: int, split: str, task: Task, epoch: int) -> int:
    """63 bits fixed by what is drawn, not by when or beside what: the same task in another epoch gets another seed."""
    text = f"{seed}|{split}|{task.source}|{task.index}|{epoch}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(slots=True)
class EngineForEpisode:
    """The policy as ``agent_run`` sees it."""

    engine: Engine
    sampling: Sampling
    episode: Episode
    base_url: str | None = None
    calls: int = 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling | None = None) -> Generation:
        key = sample_key(self.episode.seed, self.episode.sample, self.calls)
        self.calls += 1
        return await self.engine.generate(token_ids, sampling or self.sampling, key)


def sample_key(seed: int, sample: int, turn: int) -> SampleKey:
    """What fixes the uniforms of one answer; ``seed`` is the episode's."""
    return (seed, sample, turn)


class Episodes:
    """Runs episodes of one split against one engine.

    Args:
        max_tokens: longest trajectory, prompt included.
    """

    def __init__(
        self,
        manager: PluginManager,
        engine: Engine,
        tokenizer: Any,
        data: DataConfig,
        sampling: Sampling,
        max_tokens: int,
        retries: int = 0,
    ):
        self.manager = manager
        self.engine = engine
        self.tokenizer = tokenizer
        self.data = data
        self.sampling = sampling
        self.max_tokens = max_tokens
        self._short = lru_cache(4096)(self._decode)
        self.retries = retries
        agents = [item for item in manager.loaded if item.kind == "agent"]
        self.agents = {item.alias: item.key for item in agents}
        self._runs, self._closes = set(manager.names("agent_run")), set(manager.names("agent_close"))
        self._reset = {item.key: manager.bound(item.key, "agent_reset") for item in agents}
        self._step = {item.key: manager.bound(item.key, "agent_step") for item in agents}
        self.default_agent = agents[0].alias if agents else None
        self._answers = {
            item.key
            for item in agents
            # The class's own word: a subclass may do more than the class it inherits the word from.
            if vars(type(item.plugin)).get("asks_once")
            and item.key not in self._runs | self._closes
            and all(manager.is_direct(item.key, hook) for hook in ("agent_reset", "agent_step"))
        }

    def decode(self, token_ids: Sequence[int]) -> str:
        # Rewards, logs and metrics ask for the same text in turn, and samples of a group share prompts and short answers.
        return self._short(tuple(token_ids)) if len(token_ids) <= SHORT else self._decode(token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def agent_key(self, task: Task) -> str:
        name = task.agent or self.default_agent
        if name is None or name not in self.agents:
            raise UserError(
                f"task {task.source}:{task.index} asks for the agent {name!r}, which is not loaded; choose it with --agent"
            )
        return self.agents[name]

    def answers_in_groups(self, task: Task) -> bool:
        """Whether ``answer`` does for the task: its agent says ``asks_once``, and the engine takes whole groups."""
        return self.agent_key(task) in self._answers and hasattr(self.engine, "generate_group")

    async def answer(self, group_id: str, task: Task, samples: int, seed: int) -> list[Trajectory]:
        """What an agent that asks once does, for all samples of a task in one go: at a fraction of what episodes cost.

        Raises:
            EpisodeFailed: for a prompt that leaves no room; that is each sample's failure.
        """
        tokens = self._prompt(task, Step())
        sampling = self._fitting(len(tokens))
        keys = [sample_key(seed, sample, 0) for sample in range(samples)]
        made = await self.engine.generate_group(tokens, sampling, keys)  # type: ignore[attr-defined]
        return [
            Trajectory(
                episode_id=f"{group_id}-{sample}",
                group_id=group_id,
                task=task,
                sample=sample,
                segments=[Segment("prompt", list(tokens)), Segment("action", one.token_ids, one.logprobs, one.versions)],
                finish_reason=one.finish_reason,
                agent_rewards=[None],
                decode=self.decode,
            )
            for sample, one in enumerate(made)
        ]

    def _fitting(self, length: int) -> Sampling:
        """The sampling for a turn after ``length`` tokens."""
        room = self.max_tokens - length
        if room <= 0:
            raise EpisodeFailed(f"the prompt has {length} tokens; no room is left of max_tokens {self.max_tokens}")
        sampling = self.sampling
        return sampling if room >= sampling.max_new_tokens else replace(sampling, max_new_tokens=room)

    def run(self, episode: Episode) -> Coroutine[Any, Any, list[Trajectory]]:
        """The episode's trajectories; retried as configured when it fails retryably.

        Raises:
            EpisodeFailed: when it could not be finished.
        """
        # Each coroutine around another costs hundreds of episodes their part: only what is needed is put around.
        return self._retrying(episode) if self.retries else self._once(episode)

    async def _retrying(self, episode: Episode) -> list[Trajectory]:
        for attempt in range(self.retries + 1):
            try:
                return await self._once(episode if attempt == 0 else replace(episode, state=None, turn=0))
            except EpisodeFailed as failure:
                if not failure.retryable or attempt == self.retries:
                    raise
        raise AssertionError("unreachable")

    def _once(self, episode: Episode) -> Coroutine[Any, Any, list[Trajectory]]:
        key = self.agent_key(episode.task)
        if key in self._runs:
            return self._run_by_agent(key, episode)
        return self._closing(key, episode) if key in self._closes else self._take_turns(key, episode)

    async def _run_by_agent(self, key: str, episode: Episode) -> list[Trajectory]:
        policy = EngineForEpisode(self.engine, self.sampling, episode)
        trajectories = list(await self.manager.acall(key, "agent_run", episode=episode, policy=policy))
        if not trajectories:
            raise EpisodeFailed("agent_run gave no trajectory")
        for trajectory in trajectories:
            _check_trajectory(trajectory, episode, key)
            trajectory.decode = self.decode
        return trajectories

    async def _closing(self, key: str, episode: Episode) -> list[Trajectory]:
        try:
            return await self._take_turns(key, episode)
        finally:
            closing = asyncio.ensure_future(self.manager.acall(key, "agent_close", episode=episode))
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError:
                await closing  # interrupted or not, what the episode holds is released before the run goes on
                raise

    async def _take_turns(self, key: str, episode: Episode) -> list[Trajectory]:
        first: Step = await self._reset[key](episode=episode)
        tokens = self._prompt(episode.task, first)
        trajectory = Trajectory(
            episode_id=episode.episode_id,
            group_id=episode.group_id,
            task=episode.task,
            sample=episode.sample,
            segments=[Segment("prompt", tokens)],
            decode=self.decode,
        )
        while True:
            sampling = self._fitting(len(tokens))  # can fail before the first turn only: the others begin with room
            made = await self.engine.generate(tokens, sampling, sample_key(episode.seed, episode.sample, episode.turn))
            trajectory.segments.append(Segment("action", made.token_ids, made.logprobs, made.versions))
            trajectory.finish_reason = made.finish_reason
            action = Action(None, made.token_ids, made.finish_reason, self.decode)
            step: Step = await self._step[key](episode=episode, action=action)
            trajectory.agent_rewards.append(step.reward)
            if step.score is not None:
                trajectory.score = float(step.score)
            if step.metrics:
                trajectory.metrics.update(step.metrics)
            if step.done:
                return [trajectory]
            tokens = tokens + made.token_ids
            seen = self._observation(step, made)
            if len(tokens) + len(seen) >= self.max_tokens:
                trajectory.finish_reason = "length"
                return [trajectory]
            trajectory.segments.append(Segment("observation", seen))
            tokens = tokens + seen
            episode.turn += 1

    def _prompt(self, task: Task, step: Step) -> list[int]:
        seen = step.observation
        if seen is None:
            if task.prompt_ids is not None:
                return list(task.prompt_ids)
            seen = task.prompt
        if _is_tokens(seen):
            return list(seen)  # type: ignore[arg-type]
        return render_prompt(seen, self.tokenizer, self.data.system_prompt, self.data.template)  # type: ignore[arg-type]

    def _observation(self, step: Step, made: Generation) -> list[int]:
        seen = step.observation
        if seen is None:
            raise RunError("agent_step gave neither an observation nor done=True")
        if _is_tokens(seen):
            return list(seen)  # type: ignore[arg-type]
        last = made.token_ids[-1] if made.token_ids else None
        # A stop string ends the sampling, not the turn: only a special token does.
        ended = made.finish_reason == "stop" and last in self.tokenizer.all_special_ids
        return observation_ids(seen, self.tokenizer, ended, last_token=last, template=self.data.template)  # type: ignore[arg-type]


def _check_trajectory(trajectory: Trajectory, episode: Episode, key: str) -> None:
    """What the host relies on of an agent's own trajectories.

    Raises:
        RunError: naming the agent.
    """
    if trajectory.group_id != episode.group_id or trajectory.episode_id != episode.episode_id:
        raise RunError(f"{key}: agent_run must give trajectories with the episode's own group_id and episode_id")
    if not trajectory.segments or trajectory.segments[0].kind != "prompt":
        raise RunError(f"{key}: a trajectory begins with its prompt segment")
    for segment in trajectory.actions:
        count = len(segment.token_ids)
        if len(segment.logprobs or ()) != count or len(segment.versions or ()) != count:
            raise RunError(f"{key}: every sampled token keeps its log-probability and version; an action segment lacks some")


def _is_tokens(value: Any) -> bool:
    return not isinstance(value, str) and len(value) > 0 and isinstance(value[0], int)
