"""A runtime with chosen roles that lives as long as a block: for programs that sample, score or query models and train nothing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from rlhf_host.config.resolve import merge_needs
from rlhf_host.config.schema import DataConfig, RunConfig
from rlhf_host.data.sources import NO_ROWS, PythonRows
from rlhf_host.data.stream import Draw, TaskSet, TaskStream
from rlhf_host.garbage import frozen
from rlhf_host.models.loading import load_tokenizer
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.protocols import Generator
from rlhf_host.records.episodes import Episode, Generation, Group, Sampling, Task, Trajectory
from rlhf_host.records.needs import Needs, Outcome, RoleHandle, RoleNeed, ScoreContext
from rlhf_host.records.tensors import Experience
from rlhf_host.records.token_sets import support_metrics
from rlhf_host.rollouts.collect import Collected, Collector, drop_reason
from rlhf_host.rollouts.episodes import Episodes
from rlhf_host.rollouts.experience import apply_rewards, make_experience
from rlhf_host.rollouts.policy import EpisodePolicy
from rlhf_host.rollouts.scoring import judges, score_group
from rlhf_host.training import assemble
from rlhf_host.training.assemble import Started
from rlhf_host.training.evaluate import Evaluation
from rlhf_host.training.events import EventLoop, event_loop
from rlhf_host.training.inputs import tasks_of
from rlhf_host.training.lifecycle import close, run_context, run_lifecycle
from rlhf_host.training.rehearsal import check_plugins
from rlhf_host.training.rollout_source import add_advantages, add_outputs, add_prompts
from rlhf_host.training.saved_rows import SavedStep

T = TypeVar("T")


@dataclass(slots=True)
class Session:
    """Value of ``session``; its calls wait, and an interrupt ends them."""

    config: RunConfig
    manager: PluginManager
    tokenizer: Any
    outcome: Outcome
    """Outcome that ``run_finished`` gets; the block may fill in steps and metrics."""
    started: Started | None
    """None: no role is needed, so there is no runtime."""
    events: EventLoop
    rows: PythonRows = field(default_factory=dict)
    """Rows in memory that the configuration's data names."""
    _stream: TaskStream | None = None
    _collector: Collector | None = None
    _served: Iterator[int] = field(default_factory=itertools.count)
    _calls: Iterator[int] = field(default_factory=itertools.count)
    """Numbers for the calls of all its policies, so that no two share an id."""
    _episodes: Episodes | None = None

    @property
    def roles(self) -> Mapping[str, RoleHandle]:
        """Handles with ``logprobs`` and ``values``, by name."""
        return {} if self.started is None else self.started.handles

    @property
    def _running(self) -> Started:
        assert self.started is not None, "a session without roles has no runtime"
        return self.started

    def run(self, work: Coroutine[Any, Any, T], *, interruptible: bool = True) -> T:
        """Waits for a coroutine on the event loop, on which policies, engines and servers run."""
        return self.events.run(work, interruptible=interruptible)

    def policy(self) -> EpisodePolicy:
        """Returns a new conversation with the actor; run its coroutines with ``run``."""
        number, config = next(self._served), self.config
        if self._episodes is None:
            self._episodes = assemble.episodes_of(config, self.manager, self._running, config.data, config.rollout)
        policy = EpisodePolicy(
            Episode(f"served-{number}", "served", Task(""), number, config.seed, split="eval"), self._episodes
        )
        return replace(policy, _numbers=self._calls)

    def evaluation(self, tasks: TaskSet, data: DataConfig) -> Evaluation:
        return assemble.evaluation_of(self.config, self.manager, self._running, tasks, data)

    def generate(
        self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1, seed: int = 0
    ) -> list[list[Generation]]:
        """Returns ``n`` completions of each prompt by the engine; no plugin takes part."""
        engine = self._running.runtime.engine
        assert engine is not None
        answers = self.run(generations(engine, prompt_ids, sampling, n, seed))
        return [answers[begin : begin + n] for begin in range(0, len(answers), n)]

    def sample(self, step: int, groups: int) -> Collected:
        """Samples and scores the next groups of its data, as that step of a run would. Without rewards all are unjudged.

        Raises:
            RunError: too many trajectories could not be judged.
        """
        if self._stream is None:
            tasks = tasks_of(self.config, self.config.data, "train", self.tokenizer, self.rows, self.manager)
            self._stream = assemble.stream_of(self.config, self.manager, tasks)
        draw, sampler = partial(self._stream.draw, step=step), self._sampler()
        if not sampler.judges and merge_needs(self.manager).rewards:
            return self.run(self._answers(lambda: draw(groups), step))
        return self.run(sampler.fill(draw, groups, self._context(step)))

    def answer(self, step: int, tasks: Sequence[Task]) -> Collected:
        """Samples and scores a group of answers to each task. Raises ``RunError`` as ``sample`` does."""
        return self.run(self._answers(lambda: [Draw(task, 0) for task in tasks], step))

    def score_again(self, step: SavedStep) -> dict[str, float]:
        """Scores saved trajectories as a run does, in place; returns the weight of each reward. Without rewards nothing changes.

        What an agent gave stays, and so do episodes that failed.
        """
        by = judges(self.manager, step.split)
        groups: dict[str, list[Trajectory]] = {}
        for row in step.rows if by else ():
            if row.failed:
                continue  # nobody said anything that could be judged
            agent_judged = any(reward is not None for reward in row.agent_rewards)
            row.rewards, row.reward, row.unjudged_reason = {}, None, None
            row.score = row.score if agent_judged else None
            groups.setdefault(row.group_id, []).append(row)
        tokenizer = self.tokenizer if step.tokens else None  # stand-ins for tokens mean nothing
        context = ScoreContext(step.split, step.step, self.roles, tokenizer)

        async def score() -> None:
            settings = self.config.rollout
            await asyncio.gather(*(score_group(self.manager, by, group, context, settings) for group in groups.values()))

        self.run(score())
        return {alias: weight for alias, (_, weight) in by.items()}

    def drop_reason(self, group: Group) -> str | None:
        """Returns why a filter refuses the group."""
        return drop_reason(self.manager, group)

    def experience(self, step: SavedStep, groups: Sequence[Group], weights: Mapping[str, float]) -> Experience:
        """Returns groups of a saved step as a batch, with rewards transformed and, with an algorithm, advantages."""
        drawn, needs = self.config.rollout.model_copy(update=step.sampling), merge_needs(self.manager)
        needed = self.started is not None and bool(drawn.truncated_by)
        support_metrics((row for group in groups for row in group.trajectories), needed=needed)
        experience = make_experience(
            groups,
            dict(weights),
            step=step.step,
            max_new_tokens=int(drawn.max_new_tokens),
            temperature=float(drawn.temperature),
        )
        # The weights that sampled are gone, so what they gave their tokens stands for π_old.
        mode = "fused" if self.config.old_logprobs_mode == "fused" else "sampler"
        if self.started is not None:
            add_prompts(experience, self.manager, needs, self.roles)
            add_outputs(experience, self.started.runtime.trainer, needs, mode)
        elif mode == "sampler":
            experience.old_logprobs = experience.sampler_logprobs
        if self.manager.has("compute_advantages"):
            add_advantages(experience, self.manager, needs)
        else:
            apply_rewards(experience, self.manager)
        return experience

    def _sampler(self) -> Collector:
        if self._collector is None:
            self._collector = assemble.collector_of(self.config, self.manager, self._running)
            if not self._collector.judges and merge_needs(self.manager).rewards:
                self._collector.settings = self._collector.settings.model_copy(update={"max_unjudged": 1.0})
        return self._collector

    def _context(self, step: int) -> ScoreContext:
        return ScoreContext("train", step, self.roles, self.tokenizer)

    async def _answers(self, draws: Callable[[], Sequence[Draw]], step: int) -> Collected:
        collected = Collected()
        await self._sampler().run(draws(), self._context(step), collected)
        return collected


@contextmanager
def session(
    config: RunConfig,
    manager: PluginManager | None = None,
    *,
    needs: Needs | None = None,
    tokenizer: Any = None,
    tasks: TaskSet | None = None,
    rows: PythonRows = NO_ROWS,
) -> Iterator[Session]:
    """Starts a runtime and ends it with the block; calls ``run_started`` and ``run_finished`` around it.

    Args:
        config: a complete configuration, as ``rlhf_host.settings.resolve`` returns it.
        manager: plugins that take part; default: none.
        needs: the roles to load; default: the actor, and frozen roles that plugins ask for. Without roles nothing is loaded.
        tokenizer: the actor's, if it is loaded already.
        tasks: what ``sample`` draws from; default: the configuration's data.
        rows: rows in memory that this data names.

    Raises:
        UserError: the configuration cannot be used here.
        KeyboardInterrupt: the block was interrupted.
    """
    manager = PluginManager([]) if manager is None else manager
    if needs is None:
        roles = (need for need in merge_needs(manager).roles if not need.trainable and need.name != "actor")
        frozen_roles = (replace(need, follows=None) for need in roles)  # nothing moves
        needs = Needs(roles=(RoleNeed("actor", source=None), *frozen_roles))
    stream = None if tasks is None else assemble.stream_of(config, manager, tasks)
    started = None
    if needs.roles:
        tokenizer = load_tokenizer(config.roles["actor"]) if tokenizer is None else tokenizer
        start = assemble.runtime_start(config, manager, needs, tokenizer, 0, {})
        check_plugins(config, manager, start.roles, tokenizer)
        started = assemble.start_runtime(config, start)
    with event_loop(config.debug) as events:
        try:
            context = run_context(config, tokenizer, {} if started is None else started.handles)
            with run_lifecycle(events, manager, context) as outcome, frozen():
                yield Session(config, manager, tokenizer, outcome, started, events, rows, stream)
        finally:
            if started is not None:
                close(events, started)
            manager.close()


async def generations(
    engine: Generator, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, n: int, seed: int
) -> list[Generation]:
    engine.expect(n * len(prompt_ids))
    keys = [(ids, (seed, prompt, sample)) for prompt, ids in enumerate(prompt_ids) for sample in range(n)]
    return list(await asyncio.gather(*(engine.generate(ids, sampling, key) for ids, key in keys)))
