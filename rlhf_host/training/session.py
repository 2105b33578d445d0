"""A runtime with chosen roles that lives as long as a block: for programs that sample, score or query models and train nothing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rlhf_host.config.resolve import merge_needs
from rlhf_host.config.schema import DataConfig, RunConfig
from rlhf_host.data.stream import TaskSet
from rlhf_host.garbage import frozen
from rlhf_host.models.loading import load_tokenizer
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.protocols import Generator
from rlhf_host.records.episodes import Episode, Generation, Sampling, Task
from rlhf_host.records.needs import Needs, Outcome, RoleHandle, RoleNeed
from rlhf_host.rollouts.collect import Collector
from rlhf_host.rollouts.episodes import Episodes
from rlhf_host.rollouts.policy import EpisodePolicy
from rlhf_host.training import assemble
from rlhf_host.training.assemble import Started
from rlhf_host.training.evaluate import Evaluation
from rlhf_host.training.events import EventLoop, event_loop
from rlhf_host.training.lifecycle import close, run_context, run_lifecycle
from rlhf_host.training.rehearsal import check_plugins

T = TypeVar("T")


@dataclass(slots=True)
class Session:
    """Value of ``session``; its calls wait, and an interrupt ends them."""

    config: RunConfig
    manager: PluginManager
    tokenizer: Any
    outcome: Outcome
    """Outcome that ``run_finished`` gets; the block may fill in steps and metrics."""
    started: Started
    events: EventLoop
    _served: Iterator[int] = field(default_factory=itertools.count)
    _calls: Iterator[int] = field(default_factory=itertools.count)
    """Numbers for the calls of all its policies, so that no two share an id."""
    _episodes: Episodes | None = None

    @property
    def roles(self) -> Mapping[str, RoleHandle]:
        """Handles with ``logprobs`` and ``values``, by name."""
        return self.started.handles

    def run(self, work: Coroutine[Any, Any, T], *, interruptible: bool = True) -> T:
        """Waits for a coroutine on the event loop, on which policies, engines and servers run."""
        return self.events.run(work, interruptible=interruptible)

    def policy(self) -> EpisodePolicy:
        """Returns a new conversation with the actor; run its coroutines with ``run``."""
        number, config = next(self._served), self.config
        if self._episodes is None:
            self._episodes = assemble.episodes_of(config, self.manager, self.started, config.data, config.rollout)
        policy = EpisodePolicy(
            Episode(f"served-{number}", "served", Task(""), number, config.seed, split="eval"), self._episodes
        )
        return replace(policy, _numbers=self._calls)

    def collector(self) -> Collector:
        """Returns a collector that turns draws into scored groups, as a run does."""
        return assemble.collector_of(self.config, self.manager, self.started)

    def evaluation(self, tasks: TaskSet, data: DataConfig) -> Evaluation:
        return assemble.evaluation_of(self.config, self.manager, self.started, tasks, data)

    def generate(
        self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1, seed: int = 0
    ) -> list[list[Generation]]:
        """Returns ``n`` completions of each prompt by the engine; no plugin takes part."""
        engine = self.started.runtime.engine
        assert engine is not None
        answers = self.run(_answers(engine, prompt_ids, sampling, n, seed))
        return [answers[begin : begin + n] for begin in range(0, len(answers), n)]


@contextmanager
def session(
    config: RunConfig, manager: PluginManager | None = None, *, needs: Needs | None = None, tokenizer: Any = None
) -> Iterator[Session]:
    """Starts a runtime and ends it with the block; calls ``run_started`` and ``run_finished`` around it.

    Args:
        config: a complete configuration, as ``rlhf_host.settings.resolve`` returns it.
        manager: plugins that take part; default: none.
        needs: the roles to load; default: the actor, and frozen roles that plugins ask for.
        tokenizer: the actor's, if it is loaded already.

    Raises:
        UserError: the configuration cannot be used here.
        KeyboardInterrupt: the block was interrupted.
    """
    manager = PluginManager([]) if manager is None else manager
    tokenizer = load_tokenizer(config.roles["actor"]) if tokenizer is None else tokenizer
    if needs is None:
        roles = (need for need in merge_needs(manager).roles if not need.trainable and need.name != "actor")
        frozen_roles = (replace(need, follows=None) for need in roles)  # nothing moves
        needs = Needs(roles=(RoleNeed("actor", source=None), *frozen_roles))
    check_plugins(config, manager, needs, tokenizer)
    started = assemble.start_runtime(config, assemble.runtime_start(config, manager, needs, tokenizer, 0, {}))
    with event_loop(config.debug) as events:
        try:
            context = run_context(config, tokenizer, started.handles)
            with run_lifecycle(events, manager, context) as outcome, frozen():
                yield Session(config, manager, tokenizer, outcome, started, events)
        finally:
            close(events, started)
            manager.close()


async def _answers(
    engine: Generator, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, n: int, seed: int
) -> list[Generation]:
    engine.expect(n * len(prompt_ids))
    keys = [(ids, (seed, prompt, sample)) for prompt, ids in enumerate(prompt_ids) for sample in range(n)]
    return list(await asyncio.gather(*(engine.generate(ids, sampling, key) for ids, key in keys)))
