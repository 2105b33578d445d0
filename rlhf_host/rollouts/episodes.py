"""One episode: an agent and the policy taking turns, token in, token out."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_host.config.schema import DataConfig
from rlhf_host.data.chat import observation_ids, render_prompt
from rlhf_host.errors import RunError, UserError
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.protocols import Generator
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
from rlhf_host.records.numbers import Numbers


def episode_seed(seed: int, split: str, task: Task, epoch: int) -> int:
    """63 bits fixed by what is drawn, not by when or beside what: the same task in another epoch gets another seed."""
    text = f"{seed}|{split}|{task.source}|{task.index}|{epoch}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


POSITIVE = 1e-3
"""Rounding may bring a log-probability so far above 0."""


@dataclass(slots=True)
class NamedEngine:
    """The run's engine, whose defects are told by its name."""

    engine: Generator
    name: str

    def expect(self, count: int) -> None:
        self.engine.expect(count)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        try:
            answer = await self.engine.generate(token_ids, sampling, key)
            count, logprobs = len(answer.token_ids), answer.logprobs
            if len(logprobs) != count or len(answer.versions) != count or count > sampling.max_new_tokens:
                raise ValueError(f"{count} tokens of at most {sampling.max_new_tokens} with {len(logprobs)} log-probabilities")
            if count and not (math.isfinite(sum(logprobs)) and max(logprobs) < POSITIVE):
                raise ValueError("log-probabilities that are not finite, or above 0")
            for name, kind in (("token_ids", "i"), ("logprobs", "d"), ("versions", "i")):
                values = getattr(answer, name)
                if not isinstance(values, Numbers):
                    setattr(answer, name, Numbers(kind, values))
        except (UserError, RunError):
            raise
        except Exception as error:
            raise RunError(f"engine {self.name} failed in generate: {type(error).__name__}: {error}") from error
        return answer


@dataclass(slots=True)
class EngineForEpisode:
    """The policy as ``agent_run`` sees it."""

    engine: Generator | NamedEngine
    sampling: Sampling
    episode: Episode
    base_url: str | None = None
    calls: int = 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling | None = None) -> Generation:
        key = (self.episode.seed, self.episode.sample, self.calls)
        self.calls += 1
        return await self.engine.generate(token_ids, sampling or self.sampling, key)


@dataclass
class Episodes:
    """Runs episodes of one split against one engine."""

    manager: PluginManager
    engine: Generator | NamedEngine
    tokenizer: Any
    data: DataConfig
    sampling: Sampling
    max_tokens: int
    """Longest trajectory, prompt included."""
    retries: int = 0

    def __post_init__(self) -> None:
        self.agents = {item.alias: item.key for item in self.manager.loaded if item.kind == "agent"}

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def agent_key(self, task: Task) -> str:
        name = task.agent or next(iter(self.agents), None)
        if name is None or name not in self.agents:
            place = f"{task.source}:{task.index}"
            raise UserError(f"task {place} asks for the agent {name!r}, which is not loaded; choose it with --agent")
        return self.agents[name]

    def _fitting(self, length: int) -> Sampling:
        """The sampling for a turn after ``length`` tokens."""
        room = self.max_tokens - length
        if room <= 0:
            raise EpisodeFailed(f"the prompt has {length} tokens; no room is left of max_tokens {self.max_tokens}")
        sampling = self.sampling
        return sampling if room >= sampling.max_new_tokens else replace(sampling, max_new_tokens=room)

    async def play(self, episode: Episode) -> list[Trajectory]:
        """The episode's trajectories; retried as configured when it fails retryably. Raises ``EpisodeFailed`` when it could not
        be finished."""
        for _ in range(self.retries):
            try:
                return await self._play_once(replace(episode))
            except EpisodeFailed as failure:
                if not failure.retryable:
                    raise
        return await self._play_once(replace(episode))

    async def _play_once(self, episode: Episode) -> list[Trajectory]:
        key = self.agent_key(episode.task)
        try:
            if key in self.manager.names("agent_run"):
                return await self._run_by_agent(key, episode)
            return [await self._take_turns(key, episode)]
        finally:
            closing = asyncio.ensure_future(self.manager.acall(key, "agent_close", episode=episode))
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError:
                await closing  # interrupted or not, what the episode holds is released before the run goes on
                raise

    async def _run_by_agent(self, key: str, episode: Episode) -> list[Trajectory]:
        policy = EngineForEpisode(self.engine, self.sampling, episode)
        trajectories = list(await self.manager.acall(key, "agent_run", episode=episode, policy=policy))
        if not trajectories:
            raise EpisodeFailed("agent_run gave no trajectory")
        for row, trajectory in enumerate(trajectories):
            _check_trajectory(trajectory, episode, key)
            trajectory.row, trajectory.decode = row, self.decode
            if trajectory.parent is not None:
                _check_branch(trajectory, trajectories[: max(0, trajectory.parent + 1)], key)
        return trajectories

    async def _take_turns(self, key: str, episode: Episode) -> Trajectory:
        first: Step = await self.manager.acall(key, "agent_reset", episode=episode)
        tokens = self._prompt(episode.task, first)
        trajectory = Trajectory(
            episode_id=episode.episode_id,
            group_id=episode.group_id,
            task=episode.task,
            sample=episode.sample,
            segments=[Segment("prompt", Numbers("i", tokens))],
            decode=self.decode,
        )
        while True:
            sampling = self._fitting(len(tokens))  # can fail before the first turn only: the others begin with room
            answer = await self.engine.generate(tokens, sampling, (episode.seed, episode.sample, episode.turn))
            trajectory.segments.append(Segment("action", answer.token_ids, answer.logprobs, answer.versions))
            trajectory.finish_reason = answer.finish_reason
            action = Action(None, answer.token_ids, answer.finish_reason, self.decode)
            step: Step = await self.manager.acall(key, "agent_step", episode=episode, action=action)
            trajectory.agent_rewards.append(step.reward)
            if step.score is not None:
                trajectory.score = float(step.score)
            if step.metrics:
                trajectory.metrics.update(step.metrics)
            if step.done:
                return trajectory
            tokens = [*tokens, *answer.token_ids]
            observed = self._observation(step, answer)
            if len(tokens) + len(observed) >= self.max_tokens:
                trajectory.finish_reason = "length"
                return trajectory
            trajectory.segments.append(Segment("observation", Numbers("i", observed)))
            tokens += observed
            episode.turn += 1

    def _prompt(self, task: Task, step: Step) -> list[int]:
        if step.observation is None and task.prompt_ids is not None:
            return list(task.prompt_ids)
        seen = task.prompt if step.observation is None else step.observation
        if _is_tokens(seen):
            return list(seen)  # type: ignore[arg-type]
        return render_prompt(seen, self.tokenizer, self.data.system_prompt, self.data.template)  # type: ignore[arg-type]

    def _observation(self, step: Step, answer: Generation) -> list[int]:
        seen = step.observation
        if seen is None:
            raise RunError("agent_step gave neither an observation nor done=True")
        if _is_tokens(seen):
            return list(seen)  # type: ignore[arg-type]
        last = answer.token_ids[-1] if answer.token_ids else None
        # A stop string ends the sampling, not the turn: only a special token does.
        ended = answer.finish_reason == "stop" and last in self.tokenizer.all_special_ids
        return observation_ids(seen, self.tokenizer, ended, last_token=last, template=self.data.template)  # type: ignore[arg-type]


def _check_trajectory(trajectory: Trajectory, episode: Episode, key: str) -> None:
    """What the host relies on of an agent's own trajectories. Raises ``RunError``, naming the agent."""
    if trajectory.group_id != episode.group_id or trajectory.episode_id != episode.episode_id:
        raise RunError(f"{key}: agent_run must give trajectories with the episode's own group_id and episode_id")
    if not trajectory.segments or trajectory.segments[0].kind != "prompt":
        raise RunError(f"{key}: a trajectory begins with its prompt segment")
    for segment in trajectory.actions:
        count = len(segment.token_ids)
        if len(segment.logprobs or ()) != count or len(segment.versions or ()) != count:
            raise RunError(f"{key}: every sampled token keeps its log-probability and version; an action segment lacks some")


def _check_branch(row: Trajectory, until_parent: Sequence[Trajectory], key: str) -> None:
    """Raises ``RunError`` where a row does not begin as the row that it says it branched from."""
    if not until_parent or any(row is other for other in until_parent):
        raise RunError(f"{key}: row {row.row} has the parent {row.parent}; that is the index of an earlier row of its episode")
    tokens = [token for segment in until_parent[-1].segments for token in segment.token_ids]
    branch, prompt = row.branch, row.prompt_ids
    if not 0 < branch <= min(len(tokens), len(prompt)) or tokens[:branch] != prompt[:branch]:
        raise RunError(f"{key}: row {row.row} does not begin with the first {branch} tokens of row {row.parent}")


def _is_tokens(value: Any) -> bool:
    return not isinstance(value, str) and len(value) > 0 and isinstance(value[0], int)
