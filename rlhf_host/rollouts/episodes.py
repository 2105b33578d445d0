"""One episode: an agent and the policy taking turns, token in, token out."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any, get_args

from rlhf_host.config.schema import DataConfig, RolloutConfig
from rlhf_host.data.chat import for_chat
from rlhf_host.data.codec import ChatCodec
from rlhf_host.errors import RunError, UserError, told_of
from rlhf_host.plugins.manager import HookFailed, PluginManager
from rlhf_host.records.episodes import (
    FAILED,
    Action,
    Episode,
    EpisodeFailed,
    FinishReason,
    Generation,
    Message,
    NoRoom,
    SampleKey,
    Sampling,
    Segment,
    Step,
    Task,
    Trajectory,
)
from rlhf_host.records.numbers import Numbers
from rlhf_host.rollouts.conversation import Plan
from rlhf_host.rollouts.gate import Answering
from rlhf_host.rollouts.policy import FIRST_CALL_S, NEXT_CALL_S, Endpoints, EpisodePolicy, Expected

log = logging.getLogger(__name__)


def episode_seed(seed: int, split: str, task: Task, epoch: int) -> int:
    """63 bits fixed by what is drawn, not by when or beside what: the same task in another epoch gets another seed."""
    text = f"{seed}|{split}|{task.source}|{task.index}|{epoch}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


POSITIVE = 1e-3
"""Rounding may bring a log-probability so far above 0."""


@dataclass
class Episodes:
    """Runs episodes of one split against one engine."""

    manager: PluginManager
    engine: Answering
    tokenizer: Any
    data: DataConfig
    sampling: Sampling
    max_tokens: int
    """Longest trajectory, prompt included."""
    settings: RolloutConfig = field(default_factory=RolloutConfig)
    """Its retries and deadlines."""
    engine_name: str = "the engine"
    stop_ids: Collection[int] = ()
    """Tokens that end an answer, beside the tokenizer's end of sequence."""
    endpoints: Endpoints | None = None
    strict: bool = False
    """Whatever an agent raises ends the run at once."""
    frozen: Mapping[str, Episodes] = field(default_factory=dict)
    """Roles that generate, each with its engine and tokenizer."""

    def __post_init__(self) -> None:
        self.codec = ChatCodec(
            for_chat(self.tokenizer, self.data),
            self.data.template,
            system_prompt=self.data.system_prompt,
            tool_format=self.settings.tool_format,
            stop_ids=self.stop_ids,
        )
        self.live = self.asked = self.answered = 0
        self._noted: set[str] = set()
        self.agents = {item.alias: item.key for item in self.manager.loaded if item.kind == "agent"}
        limits = {key: needs.episodes_at_once for key, needs in self.manager.each("needs")}
        self._slots = {key: asyncio.Semaphore(most) for key, most in limits.items() if most}

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def agent_key(self, task: Task) -> str:
        name = task.agent or next(iter(self.agents), None)
        if name is None or name not in self.agents:
            place = f"{task.source}:{task.index}"
            raise UserError(
                f"task {place} asks for the agent {name!r}, which is not loaded; choose it with --agent or --agents"
            )
        return self.agents[name]

    def fitting(self, length: int) -> Sampling:
        """The sampling for a turn after ``length`` tokens."""
        room = self.max_tokens - length
        if room <= 0:
            raise NoRoom(f"the prompt has {length} tokens; no room is left of max_tokens {self.max_tokens}")
        sampling = self.sampling
        return sampling if room >= sampling.max_new_tokens else replace(sampling, max_new_tokens=room)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        """What the engine answers. Raises ``RunError`` with its name for whatever it gets wrong."""
        self.asked += 1
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
        self.answered += 1
        return answer

    def expect(self, more: int) -> None:
        """So many more episodes than before may ask the engine soon."""
        self.live += more
        self.engine.expect(self.live)

    async def play(self, episode: Episode) -> list[Trajectory]:
        """The episode's trajectories; retried as configured when it fails retryably.

        Raises:
            EpisodeFailed: it could not be finished. Whatever an agent's hook raises, and an answer that nobody can use, fails its
                episode alone; the first of each kind is said. The host's own errors end the run.
        """
        attempts = self.settings.episode_retries + 1
        while True:
            attempts -= 1
            try:
                rows = await self._play_once(replace(episode))
                rows[0].events = episode.events
                return rows
            except TimeoutError as late:
                raise self._failed(self.agent_key(episode.task), late) from late
            except HookFailed as failure:
                cause = failure.__cause__
                if self.strict or isinstance(cause, UserError | RunError):
                    if self.strict and cause is not None:
                        log.error("%s", failure, exc_info=(type(cause), cause, cause.__traceback__))
                    raise
                raise self._failed(failure.key, failure) from failure
            except EpisodeFailed as failure:
                if not failure.retryable or not attempts:
                    raise
                episode.log("retry", reason=failure.reason)

    def failed_row(self, episode: Episode, reason: str) -> Trajectory:
        """What the log has of an episode that failed."""
        ids = (episode.episode_id, episode.group_id)
        prompt = Segment("prompt", Numbers("i", episode.task.prompt_ids or ()))
        row = Trajectory(*ids, episode.task, [prompt], "abort", episode.sample, unjudged_reason=f"{FAILED}{reason}")
        row.decode, row.events = self.decode, episode.events
        return row

    def _failed(self, key: str, error: Exception) -> EpisodeFailed:
        failure = EpisodeFailed(str(error))
        cause = error.__cause__ if isinstance(error, HookFailed) else error
        failure.kind = f"{self.manager.by_key[key].alias}:{type(cause or TypeError()).__name__}"
        if failure.kind not in self._noted:
            self._noted.add(failure.kind)
            shown = (type(cause), cause, cause.__traceback__) if cause and cause is not error else None
            log.warning("%s; this episode has failed, and others that fail so are counted", error, exc_info=shown)
        return failure

    async def _play_once(self, episode: Episode) -> list[Trajectory]:
        key = self.agent_key(episode.task)
        runs = key in self.manager.names("agent_run")
        play = self._run_by_agent if runs else self._take_turns
        expected = Expected(self.expect, NEXT_CALL_S if runs else FIRST_CALL_S)
        expected.begin()
        try:
            async with self._slots.get(key, contextlib.nullcontext()):
                return await self._played(key, episode, expected, play)
        finally:
            expected.end()

    async def _played(
        self, key: str, episode: Episode, expected: Expected, play: Callable[..., Awaitable[list[Trajectory]]]
    ) -> list[Trajectory]:
        try:
            with contextlib.closing(self.policy(episode, expected)) as policy:
                rows = await play(key, episode, policy)
        except BaseException:
            try:
                await self._close(key, episode)
            except (HookFailed, TimeoutError) as error:
                log.info("%s; its episode had failed before", error)
            raise
        await self._close(key, episode)
        return rows

    async def _close(self, key: str, episode: Episode) -> None:
        timeout_s = self.settings.step_timeout_s
        closing = asyncio.ensure_future(self.manager.acall(key, "agent_close", within_s=timeout_s, episode=episode))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError):
                await closing  # interrupted or not, what the episode holds is released before the run goes on
            raise

    def policy(self, episode: Episode, expected: Expected | None = None) -> EpisodePolicy:
        """The policy for one attempt at an episode."""
        history = self.settings.history
        frozen = {name: episodes.policy for name, episodes in self.frozen.items()}
        return EpisodePolicy(
            episode,
            self.sampling,
            self.max_tokens,
            self.codec,
            self.generate,
            self.fitting,
            history,
            expected,
            self.endpoints,
            frozen,
        )

    async def _run_by_agent(self, key: str, episode: Episode, policy: EpisodePolicy) -> list[Trajectory]:
        timeout_s = self.settings.episode_timeout_s
        rows = await self.manager.acall(key, "agent_run", within_s=timeout_s, episode=episode, policy=policy)
        trajectories = list(rows)
        if len({id(row) for row in trajectories}) < len(trajectories):
            self.manager.raise_misfit(key, "agent_run", "gave one trajectory twice, so its tokens would train twice")
        if not trajectories:
            raise EpisodeFailed("agent_run gave no trajectory")
        for row, trajectory in enumerate(trajectories):
            if problem := _problem(trajectory, episode) or _told_problem(trajectory):
                self.manager.raise_misfit(key, "agent_run", problem)
            length = sum(len(segment.token_ids) for segment in trajectory.segments)
            if length > self.max_tokens:
                raise EpisodeFailed(f"{key}: a trajectory has {length} tokens, more than max_tokens {self.max_tokens}")
            _make_plain(trajectory)
            trajectory.row, trajectory.decode = row, self.decode
            if problem := _branch_problem(trajectory, trajectories):
                self.manager.raise_misfit(key, "agent_run", problem)
        if not any(trajectory.final for trajectory in trajectories):
            self.manager.raise_misfit(key, "agent_run", "gave no final row: set final on the one with the answer")
        return trajectories

    async def _take_turns(self, key: str, episode: Episode, policy: EpisodePolicy) -> list[Trajectory]:
        timeout_s = self.settings.step_timeout_s
        first: Step = await self.manager.acall(key, "agent_reset", within_s=timeout_s, episode=episode)
        if problem := _step_problem(first) or ("gave done=True: nothing was played yet" if first.done else ""):
            self.manager.raise_misfit(key, "agent_reset", f"{problem} from agent_reset")
        tools = first.tools
        plan = Plan(None, self._prompt(episode.task, first), "root")
        tokens = len(plan.added)
        agent_rewards: list[float | None] = []
        score: float | None = None
        metrics, cut = dict[str, float](), False
        while True:
            # There may be no room before the first turn only: the others begin with some.
            call = await policy.answer(plan, key=(episode.seed, episode.sample, episode.turn), tools=tools)
            answer = call.generation
            assert answer is not None
            parse = partial(policy.read, call, answer, tools)
            action = Action(None, answer.token_ids, answer.finish_reason, self.decode, parse)
            step: Step = await self.manager.acall(key, "agent_step", within_s=timeout_s, episode=episode, action=action)
            if problem := _step_problem(step):
                self.manager.raise_misfit(key, "agent_step", f"{problem} from agent_step")
            agent_rewards.append(step.reward)
            score = score if step.score is None else step.score
            metrics.update(step.metrics)
            if step.done:
                break
            tools = step.tools if step.tools is not None else tools
            observed = self._observation(step, action, tools, key)
            tokens += len(answer.token_ids) + len(observed)
            if cut := tokens >= self.max_tokens:
                break
            plan = Plan(call, observed, "extend")
            episode.turn += 1
        [trajectory] = policy.trajectories()
        trajectory.decode, trajectory.agent_rewards = self.decode, agent_rewards
        trajectory.score, trajectory.metrics = score, metrics
        if problem := _told_problem(trajectory):
            self.manager.raise_misfit(key, "agent_step", problem)
        _make_plain(trajectory)
        if cut:
            trajectory.finish_reason = "length"
        return [trajectory]

    def _prompt(self, task: Task, step: Step) -> Sequence[int]:
        if step.observation is None and task.prompt_ids is not None and not step.tools:
            return task.prompt_ids
        seen = task.prompt if step.observation is None else step.observation
        if _is_tokens(seen):
            return seen  # type: ignore[return-value]
        return self.codec.render(as_messages(seen), step.tools)  # type: ignore[arg-type]

    def _observation(self, step: Step, action: Action, tools: Sequence[Mapping[str, Any]] | None, key: str) -> Sequence[int]:
        seen = step.observation
        if seen is None:
            self.manager.raise_misfit(key, "agent_step", "gave neither an observation nor done=True from agent_step")
        if _is_tokens(seen):
            return seen  # type: ignore[return-value]
        last: Message = {"role": "assistant", "content": action.text} if tools is None else action.message.message
        return self.codec.delta(last, as_messages(seen), action.token_ids, tools=tools)  # type: ignore[arg-type]


def as_messages(seen: str | Sequence[Message]) -> list[Message]:
    """A text as a user's message."""
    return [{"role": "user", "content": seen}] if isinstance(seen, str) else list(seen)


def _problem(trajectory: Trajectory, episode: Episode) -> str:
    """What of an agent's own trajectory the host cannot use."""
    if not isinstance(trajectory, Trajectory):
        return f"gave a {type(trajectory).__name__} from agent_run, expected Trajectory"
    if trajectory.group_id != episode.group_id or trajectory.episode_id != episode.episode_id:
        return "gave a trajectory without the episode's own group_id and episode_id from agent_run"
    if not trajectory.segments or trajectory.segments[0].kind != "prompt":
        return "gave a trajectory that does not begin with its prompt segment from agent_run"
    if trajectory.finish_reason not in get_args(FinishReason):
        known = ", ".join(get_args(FinishReason))
        return f"gave the finish_reason {trajectory.finish_reason!r} from agent_run; it is one of {known}"
    for segment in trajectory.actions:
        count = len(segment.token_ids)
        if len(segment.logprobs or ()) != count or len(segment.versions or ()) != count:
            return "gave an action segment from agent_run where some tokens lack their log-probability or version"
        if count and not math.isfinite(sum(segment.logprobs or ())):
            return "gave an action segment from agent_run with log-probabilities that are not finite"
    return ""


def _step_problem(step: Step) -> str:
    """What of a step no one can use."""
    seen = step.observation
    if hasattr(seen, "tolist"):
        step.observation = seen = seen.tolist()  # type: ignore[union-attr]
    if seen is not None and not isinstance(seen, str):
        if not isinstance(seen, Sequence) or not seen:
            return f"gave an observation of the type {type(seen).__name__}; it is a text, messages or token ids"
        tokens = all(isinstance(one, int) and 0 <= one < 1 << 31 for one in seen)
        if not tokens and not all(isinstance(one, Mapping) and "role" in one for one in seen):
            return f"gave the observation {str(seen)[:60]}; it is a text, messages with a role each, or token ids"
    if not isinstance(step.metrics, Mapping):
        return f"gave metrics of the type {type(step.metrics).__name__}"
    return ""


def _told_problem(row: Trajectory) -> str:
    """What an agent says of a row that is no reward, score or metric."""
    for name, value in row.metrics.items():
        if not isinstance(value, float | Real):  # float first: asking an abstract class takes ten times as long
            return f"gave {value!r} as the metric {name!r}; a metric is a number"
    if not isinstance(row.agent_rewards, list) or len(row.agent_rewards) > len(row.actions):
        return f"gave the agent_rewards {row.agent_rewards!r} for {len(row.actions)} turns: a list, a number or None for each"
    if odd := [value for value in row.agent_rewards if not isinstance(value, float | Real | None)]:
        return f"gave {odd[0]!r} as a reward; a reward is a number"
    if row.score is not None and not (isinstance(row.score, float | Real) and 0.0 <= row.score <= 1.0):
        return f"gave the score {row.score!r}; a score lies in [0, 1]"
    return ""


def _make_plain(row: Trajectory) -> None:
    """Other numbers than these have no place in files."""
    row.metrics = {name: float(value) for name, value in row.metrics.items()}
    row.agent_rewards = [None if value is None else float(value) for value in row.agent_rewards]
    row.score = None if row.score is None else float(row.score)


def _branch_problem(row: Trajectory, rows: Sequence[Trajectory]) -> str:
    """Whether a row does not begin as the row that it says it branched from."""
    if row.parent is None:
        return ""
    if not 0 <= row.parent < row.row:
        return f"gave row {row.row} with the parent {row.parent}; that is the index of an earlier row of its episode"
    tokens = [token for segment in rows[row.parent].segments for token in segment.token_ids]
    branch, prompt = row.branch, row.prompt_ids
    if not 0 < branch <= min(len(tokens), len(prompt)) or tokens[:branch] != prompt[:branch]:
        return f"gave row {row.row}, which does not begin with the first {branch} tokens of row {row.parent}"
    return ""


def _is_tokens(value: Any) -> bool:
    return not isinstance(value, str) and len(value) > 0 and isinstance(value[0], int)
