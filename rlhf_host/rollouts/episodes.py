"""One episode: an agent and the policy take turns, token in, token out."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rlhf_host.data.codec import ChatCodec, with_pictures
from rlhf_host.data.template_writer import MEMO
from rlhf_host.data.templates import for_chat, for_row
from rlhf_host.errors import RunError, UserError, blaming
from rlhf_host.plugins.manager import HookFailed, PluginManager
from rlhf_host.protocols import Server
from rlhf_host.records.episodes import (
    FAILED,
    Action,
    Episode,
    EpisodeFailed,
    Generation,
    Message,
    SampleKey,
    Sampling,
    Segment,
    Step,
    Task,
    Trajectory,
)
from rlhf_host.records.needs import AgentNeeds
from rlhf_host.records.numbers import Numbers
from rlhf_host.records.pictures import images_of, pictures_in, with_images
from rlhf_host.rollouts.agent_answers import branch_problem, is_tokens, step_problem, told_problem, trajectory_problem
from rlhf_host.rollouts.conversation import Plan
from rlhf_host.rollouts.episode_settings import EpisodeSettings, SampledModel
from rlhf_host.rollouts.policy import FIRST_CALL_S, NEXT_CALL_S, EpisodePolicy, Expected

log = logging.getLogger(__name__)


def episode_seed(seed: int, split: str, task: Task, epoch: int) -> int:
    """Returns a 63-bit seed that depends on what is drawn, not on timing or order. The same task in another epoch gets another
    seed.
    """
    text = f"{seed}|{split}|{task.source}|{task.index}|{epoch}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


NO_TEXT = (
    "token %d was sampled, and the tokenizer has only %d: rewards read nothing there; give the tokenizer that the model was"
    " trained with, or cut the model's embedding to it"
)
POSITIVE = 1e-3
"""Largest log-probability above 0 that rounding may cause."""


@dataclass
class Episodes:
    """Runs episodes of one split against one engine."""

    manager: PluginManager
    model: SampledModel
    settings: EpisodeSettings
    endpoints: Server | None = None
    frozen: Mapping[str, Episodes] = field(default_factory=dict)
    """Roles that generate, each with its own model."""

    def __post_init__(self) -> None:
        self.vocabulary = self.model.vocabulary
        self.codec = self._codec(for_chat(self.model.tokenizer, self.settings.data))
        self._codecs: dict[str, ChatCodec] = {}
        """Codecs of tasks whose rows pass values to the chat template, by these values."""
        self.answered = 0
        self._noted: set[str] = set()
        self.agents = {item.alias: item.key for item in self.manager.loaded if item.kind == "agent"}
        limits = {key: AgentNeeds.of(needs).episodes_at_once for key, needs in self.manager.needs().items()}
        self._slots = {key: asyncio.Semaphore(most) for key, most in limits.items() if most}

    @property
    def sampled(self) -> int:
        """Number of tokens that the engines have sampled, if they report it."""
        return self.model.engine.sampled + sum(each.sampled for each in self.frozen.values())

    def _codec(self, tokenizer: Any) -> ChatCodec:
        return ChatCodec(
            tokenizer,
            self.settings.data.template,
            system_prompt=self.settings.data.system_prompt,
            tool_format=self.settings.rollout.tool_format,
            stop_ids=self.model.stop_ids,
        )

    def codec_of(self, task: Task) -> ChatCodec:
        """Returns the codec whose chat template gets the values of the task's row."""
        if not task.template_kwargs:
            return self.codec
        key = json.dumps(task.template_kwargs, sort_keys=True, default=str)
        if key not in self._codecs:
            if len(self._codecs) >= MEMO:
                self._codecs.clear()
            self._codecs[key] = self._codec(for_row(self.codec.tokenizer, task.template_kwargs))
        return self._codecs[key]

    def frozen_role(self, name: str, episode: Episode) -> Episodes:
        name = self.manager.one("choose_role", episode=episode, role=name) or name
        if name not in self.frozen:
            asked = f"Needs(roles=(RoleNeed({name!r}, generates=True),))"
            raise ValueError(f"no role {name!r} generates here; an agent asks for one in needs(): {asked}")
        return self.frozen[name]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.model.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def agent_key(self, task: Task) -> str:
        name = task.agent or next(iter(self.agents), None)
        if name is None or name not in self.agents:
            place = f"{task.source}:{task.index}"
            raise UserError(
                f"task {place} asks for the agent {name!r}, which is not loaded; choose it with --agent or --agents"
            )
        return self.agents[name]

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        """Returns the engine's answer. Raises ``RunError`` with the engine's name if the answer is invalid."""
        if images_of(token_ids) and not self.model.images:
            raise UserError(f"{self.model.engine_name} takes no prompts with pictures: choose another --engine")
        with blaming(self.model.engine_name, "generate"):
            answer = await self.model.engine.generate(token_ids, sampling, key)
            count, logprobs = len(answer.token_ids), answer.logprobs
            if len(logprobs) != count or len(answer.versions) != count or count > sampling.max_new_tokens:
                raise ValueError(f"{count} tokens of at most {sampling.max_new_tokens} with {len(logprobs)} log-probabilities")
            if count and not (math.isfinite(sum(logprobs)) and max(logprobs) < POSITIVE):
                raise ValueError("log-probabilities that are not finite, or above 0")
            for name, kind in (("token_ids", "i"), ("logprobs", "d"), ("versions", "i")):
                values = getattr(answer, name)
                if not isinstance(values, Numbers):
                    setattr(answer, name, Numbers(kind, values))
            if count and max(answer.token_ids) >= self.model.texts and NO_TEXT not in self._noted:
                self._noted.add(NO_TEXT)
                log.warning(NO_TEXT, max(answer.token_ids), self.model.texts)
        self.answered += 1
        return answer

    async def play(self, episode: Episode) -> list[Trajectory]:
        """Returns the episode's trajectories; retries a retryable failure as configured.

        Raises:
            EpisodeFailed: it could not be finished. An exception of an agent's hook, or an unusable answer, fails only its own
                episode; the first of each kind is logged. The host's own errors end the run.
        """
        attempts = self.settings.rollout.episode_retries + 1
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
                if self.settings.strict or isinstance(cause, UserError | RunError):
                    if self.settings.strict and cause is not None:
                        log.error("%s", failure, exc_info=(type(cause), cause, cause.__traceback__))
                    raise
                raise self._failed(failure.key, failure) from failure
            except EpisodeFailed as failure:
                if not failure.retryable or not attempts:
                    raise
                episode._note("retry", reason=failure.reason)

    def failed_row(self, episode: Episode, reason: str) -> Trajectory:
        """Returns the log's row for an episode that failed."""
        ids = (episode.episode_id, episode.group_id)
        prompt = Segment("prompt", Numbers("i", episode.task.prompt_ids or ()), images=episode.task.images)
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
            log.warning("%s; this episode failed; further failures of this kind are only counted", error, exc_info=shown)
        return failure

    async def _play_once(self, episode: Episode) -> list[Trajectory]:
        key = self.agent_key(episode.task)
        runs = key in self.manager.names("agent_run")
        play = self._run_by_agent if runs else self._take_turns
        with closing(Expected(self.model.engine.expect, NEXT_CALL_S if runs else FIRST_CALL_S)) as expected:
            expected.wait(FIRST_CALL_S)
            async with self._slots.get(key, contextlib.nullcontext()):
                try:
                    with closing(EpisodePolicy(episode, self, expected=expected)) as policy:
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
        timeout_s = self.settings.rollout.step_timeout_s
        closing = asyncio.ensure_future(self.manager.acall(key, "agent_close", within_s=timeout_s, episode=episode))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError):
                await closing  # interrupted or not, what the episode holds is released before the run goes on
            raise

    async def _run_by_agent(self, key: str, episode: Episode, policy: EpisodePolicy) -> list[Trajectory]:
        timeout_s = self.settings.rollout.episode_timeout_s
        trajectories = list(await self.manager.acall(key, "agent_run", within_s=timeout_s, episode=episode, policy=policy))
        if len({id(row) for row in trajectories}) < len(trajectories):
            self.manager.refuse_answer(key, "agent_run", "gave one trajectory twice, so its tokens would train twice")
        if not trajectories:
            raise EpisodeFailed("agent_run gave no trajectory")
        for row, trajectory in enumerate(trajectories):
            if problem := trajectory_problem(trajectory, episode, self.vocabulary) or told_problem(trajectory):
                self.manager.refuse_answer(key, "agent_run", problem)
            length = sum(len(segment.token_ids) for segment in trajectory.segments)
            if length > self.settings.max_tokens:
                raise EpisodeFailed(f"{key}: a trajectory has {length} tokens, more than max_tokens {self.settings.max_tokens}")
            trajectory.row, trajectory.decode = row, self.decode
            if problem := branch_problem(trajectory, trajectories):
                self.manager.refuse_answer(key, "agent_run", problem)
        if not any(trajectory.final for trajectory in trajectories):
            self.manager.refuse_answer(key, "agent_run", "gave no final row: set final on the one with the answer")
        return trajectories

    async def _take_turns(self, key: str, episode: Episode, policy: EpisodePolicy) -> list[Trajectory]:
        timeout_s = self.settings.rollout.step_timeout_s
        first: Step = await self.manager.acall(key, "agent_reset", within_s=timeout_s, episode=episode)
        if problem := step_problem(first, self.vocabulary) or ("gave done=True: nothing was played yet" if first.done else ""):
            self.manager.refuse_answer(key, "agent_reset", f"{problem} from agent_reset")
        tools = first.tools
        prompt = self._prompt(episode.task, first)
        plan = Plan(None, prompt, "root", images=images_of(prompt))
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
            if problem := step_problem(step, self.vocabulary):
                self.manager.refuse_answer(key, "agent_step", f"{problem} from agent_step")
            agent_rewards.append(step.reward)
            score = score if step.score is None else step.score
            metrics.update(step.metrics)
            if step.done:
                break
            tools = step.tools if step.tools is not None else tools
            observed = self._observation(policy.codec, step, action, tools, key)
            tokens += len(answer.token_ids) + len(observed)
            if cut := tokens >= self.settings.max_tokens:
                break
            plan = Plan(call, observed, "extend", images=images_of(observed))
            episode.turn += 1
        [trajectory] = policy.trajectories()
        trajectory.decode, trajectory.agent_rewards = self.decode, agent_rewards
        trajectory.score, trajectory.metrics = score, metrics
        if problem := told_problem(trajectory):
            self.manager.refuse_answer(key, "agent_step", problem)
        if cut:
            trajectory.finish_reason = "length"
        return [trajectory]

    def _prompt(self, task: Task, step: Step) -> Sequence[int]:
        if step.observation is None and task.prompt_ids is not None and not step.tools:
            return with_images(task.prompt_ids, [(0, picture) for picture in task.images])
        seen = task.prompt if step.observation is None else step.observation
        if is_tokens(seen):
            return seen  # type: ignore[return-value]
        if task.tools and step.tools and list(step.tools) != list(task.tools):
            raise UserError(
                f"{task.source}, task {task.index + 1}: both the row and the agent bring tools: leave the row's unread (data.ignore"
                " tools)"
            )
        messages = as_messages(seen)  # type: ignore[arg-type]
        ids = self.codec_of(task).render(messages, step.tools or task.tools)
        return with_images(ids, [(0, picture) for picture in pictures_in(messages)])

    def _observation(
        self, codec: ChatCodec, step: Step, action: Action, tools: Sequence[Mapping[str, Any]] | None, key: str
    ) -> Sequence[int]:
        seen = step.observation
        if seen is None:
            self.manager.refuse_answer(key, "agent_step", "gave neither an observation nor done=True from agent_step")
        if is_tokens(seen):
            return seen  # type: ignore[return-value]
        last: Message = {"role": "assistant", "content": action.text} if tools is None else action.message.message
        messages = as_messages(seen)  # type: ignore[arg-type]
        ids = codec.delta(last, messages, action.token_ids, tools=tools)
        return with_images(ids, [(0, picture) for picture in pictures_in(messages)])


def as_messages(seen: str | Sequence[Message]) -> Sequence[Message]:
    """Returns a text as a user's message, and messages with the pictures of their parts."""
    return [{"role": "user", "content": seen}] if isinstance(seen, str) else with_pictures(seen)
