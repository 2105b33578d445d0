"""One episode: an agent and the policy taking turns, token in, token out."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_host.config.schema import DataConfig, RolloutConfig
from rlhf_host.data.chat import observation_ids, render_prompt
from rlhf_host.errors import RunError, UserError, told_of
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
class EngineForEpisode:
    """The policy as ``agent_run`` sees it."""

    episodes: Episodes
    episode: Episode
    sampling: Sampling
    calls: int = 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling | None = None) -> Generation:
        chosen = self.episodes.fitting(len(token_ids))
        if sampling is not None:
            chosen = self._asked(sampling, chosen)
        key = (self.episode.seed, self.episode.sample, self.calls)
        self.calls += 1
        return await self.episodes.generate(token_ids, chosen, key)

    def _asked(self, asked: Sampling, run: Sampling) -> Sampling:
        """``asked``, within the run's bounds."""
        bounds: dict[str, Any] = {
            "max_new_tokens": min(asked.max_new_tokens, run.max_new_tokens),
            "stop": tuple(dict.fromkeys(run.stop + asked.stop)),
            "stop_token_ids": tuple(dict.fromkeys(run.stop_token_ids + asked.stop_token_ids)),
        }
        chosen, trained = replace(asked, **bounds), replace(run, **bounds)
        if self.episode.split == "train" and chosen != trained:
            raise ValueError(
                f"it asks for {_distribution(asked)}, and this run trains on {_distribution(run)}: pass"
                " dataclasses.replace(policy.sampling, ...) with other max_new_tokens or stops only"
            )
        return chosen


def _distribution(sampling: Sampling) -> str:
    return ", ".join(f"{name} {getattr(sampling, name):g}" for name in ("temperature", "top_p", "top_k", "min_p"))


@dataclass
class Episodes:
    """Runs episodes of one split against one engine."""

    manager: PluginManager
    engine: Generator
    tokenizer: Any
    data: DataConfig
    sampling: Sampling
    max_tokens: int
    """Longest trajectory, prompt included."""
    settings: RolloutConfig = field(default_factory=RolloutConfig)
    """Its retries and deadlines."""
    engine_name: str = "the engine"

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

    def fitting(self, length: int) -> Sampling:
        """The sampling for a turn after ``length`` tokens."""
        room = self.max_tokens - length
        if room <= 0:
            raise EpisodeFailed(f"the prompt has {length} tokens; no room is left of max_tokens {self.max_tokens}")
        sampling = self.sampling
        return sampling if room >= sampling.max_new_tokens else replace(sampling, max_new_tokens=room)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        """What the engine answers. Raises ``RunError`` with its name for whatever it gets wrong."""
        with told_of(self.engine_name, "generate"):
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
        return answer

    async def play(self, episode: Episode) -> list[Trajectory]:
        """The episode's trajectories; retried as configured when it fails retryably. Raises ``EpisodeFailed`` when it could not
        be finished."""
        attempts = self.settings.episode_retries + 1
        while True:
            attempts -= 1
            try:
                return await self._play_once(replace(episode))
            except TimeoutError as late:
                raise EpisodeFailed(str(late)) from late
            except EpisodeFailed as failure:
                if not failure.retryable or not attempts:
                    raise

    async def _play_once(self, episode: Episode) -> list[Trajectory]:
        key = self.agent_key(episode.task)
        try:
            if key in self.manager.names("agent_run"):
                return await self._run_by_agent(key, episode)
            return [await self._take_turns(key, episode)]
        finally:
            timeout_s = self.settings.step_timeout_s
            closing = asyncio.ensure_future(self.manager.acall(key, "agent_close", within_s=timeout_s, episode=episode))
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError:
                with contextlib.suppress(TimeoutError):
                    await closing  # interrupted or not, what the episode holds is released before the run goes on
                raise

    async def _run_by_agent(self, key: str, episode: Episode) -> list[Trajectory]:
        policy = EngineForEpisode(self, episode, self.sampling)
        timeout_s = self.settings.episode_timeout_s
        trajectories = list(await self.manager.acall(key, "agent_run", within_s=timeout_s, episode=episode, policy=policy))
        if not trajectories:
            raise EpisodeFailed("agent_run gave no trajectory")
        for row, trajectory in enumerate(trajectories):
            _check_trajectory(trajectory, episode, key)
            length = sum(len(segment.token_ids) for segment in trajectory.segments)
            if length > self.max_tokens:
                raise EpisodeFailed(f"{key}: a trajectory has {length} tokens, more than max_tokens {self.max_tokens}")
            trajectory.row, trajectory.decode = row, self.decode
            if trajectory.parent is not None:
                _check_branch(trajectory, trajectories[: max(0, trajectory.parent + 1)], key)
        return trajectories

    async def _take_turns(self, key: str, episode: Episode) -> Trajectory:
        timeout_s = self.settings.step_timeout_s
        first: Step = await self.manager.acall(key, "agent_reset", within_s=timeout_s, episode=episode)
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
            sampling = self.fitting(len(tokens))  # can fail before the first turn only: the others begin with room
            answer = await self.generate(tokens, sampling, (episode.seed, episode.sample, episode.turn))
            trajectory.segments.append(Segment("action", answer.token_ids, answer.logprobs, answer.versions))
            trajectory.finish_reason = answer.finish_reason
            action = Action(None, answer.token_ids, answer.finish_reason, self.decode)
            step: Step = await self.manager.acall(key, "agent_step", within_s=timeout_s, episode=episode, action=action)
            trajectory.agent_rewards.append(step.reward)
            if step.score is not None:
                trajectory.score = float(step.score)
            if step.metrics:
                trajectory.metrics.update(step.metrics)
            if step.done:
                return trajectory
            tokens = [*tokens, *answer.token_ids]
            observed = self._observation(step, answer, key)
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

    def _observation(self, step: Step, answer: Generation, key: str) -> list[int]:
        seen = step.observation
        if seen is None:
            raise RunError(f"{key}: agent_step gave neither an observation nor done=True")
        if _is_tokens(seen):
            return list(seen)  # type: ignore[arg-type]
        last = answer.token_ids[-1] if answer.token_ids else None
        # A stop string ends the sampling, not the turn: only a special token does.
        ended = answer.finish_reason == "stop" and last in self.tokenizer.all_special_ids
        return observation_ids(seen, self.tokenizer, ended, last_token=last, template=self.data.template)  # type: ignore[arg-type]


def _check_trajectory(trajectory: Trajectory, episode: Episode, key: str) -> None:
    """What the host relies on of an agent's own trajectories. Raises ``RunError``, naming the agent."""
    if not isinstance(trajectory, Trajectory):
        raise RunError(f"{key} gave a {type(trajectory).__name__} from agent_run, expected Trajectory")
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
