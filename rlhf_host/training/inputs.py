"""Inputs of a run, read before anything is written: tokenizer and data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from rlhf_host.config.schema import DataConfig, RunConfig
from rlhf_host.data.sources import load_tasks
from rlhf_host.data.stream import TaskSet
from rlhf_host.data.templates import tells_the_day
from rlhf_host.errors import UserError, near_matches
from rlhf_host.models.loading import load_tokenizer, sizes
from rlhf_host.phases import phase
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.plugins.selection import find_data
from rlhf_host.protocols.data import Evaluate, GivenData, PythonRows, Split
from rlhf_host.records.needs import AlgoNeeds, Needs, ScoreContext
from rlhf_host.rollouts.admission import Admission, InAdvance
from rlhf_host.rollouts.overtaking import Overtaking
from rlhf_host.rollouts.pipeline import Pipeline
from rlhf_host.training.assemble import Started, collector_of, evaluation_of, stream_of
from rlhf_host.training.batching import refuse_large_answers
from rlhf_host.training.events import EventLoop
from rlhf_host.training.rehearsal import check_inputs
from rlhf_host.training.rollout_source import RolloutSource
from rlhf_host.training.sampled_rollouts import Rollouts, SampledRollouts
from rlhf_host.training.source import Source

log = logging.getLogger(__name__)

STEPS = 100
"""Steps of a run that samples and says no number."""
FIRST = 1000
"""Tasks of each source that are looked at for pictures before a run starts."""
RAISE_STEPS = "; raise --train.steps to continue"


@dataclass(slots=True)
class Inputs:
    """Tokenizer and data, read before anything is written."""

    config: RunConfig
    """The configuration that they were read with, in which every model is found."""
    tokenizer: Any
    data: GivenData


@dataclass(slots=True)
class TaskData:
    """``GivenData`` of a run that samples: tasks."""

    tasks: TaskSet
    held_out: TaskSet | None = None

    @property
    def report(self) -> list[str]:
        held_out = [] if self.held_out is None else self.held_out.report
        return [*self.tasks.report, *(f"held out: {line}" for line in held_out)]

    @property
    def pictured(self) -> bool:
        known = [each for each in self.tasks.sources.values() if isinstance(each, Sequence)]
        return any(task.images for tasks in known for task in tasks[: FIRST if isinstance(tasks, list) else 1])

    def steps(self, config: RunConfig) -> int:
        return config.train.steps or STEPS

    def end(self, config: RunConfig) -> tuple[int, str]:
        return self.steps(config), RAISE_STEPS

    def computed(self, config: RunConfig, manager: PluginManager, needs: Needs) -> Sequence[str]:
        return ()

    def source(self, config: RunConfig, manager: PluginManager, started: Started, events: EventLoop) -> Source:
        context = ScoreContext("train", 0, started.handles, started.tokenizer)
        rollouts = self._rollouts(config, manager, started, context)
        return RolloutSource(rollouts, config, manager, started.needs, started.runtime.trainer, context, events)

    def _rollouts(self, config: RunConfig, manager: PluginManager, started: Started, context: ScoreContext) -> Rollouts:
        """Rollouts that are sampled in turns with training, or ahead of it."""
        size, depth = config.train.batch_size, config.async_depth
        stream, collector = stream_of(config, manager, self.tasks), collector_of(config, manager, started)
        # An engine that works in waves wants all requests at once, and a plugin that chooses tasks all of a round.
        if not depth and (started.traits.engine.waves or manager.has("draw_tasks")):
            return SampledRollouts(stream, collector, size)
        sizes = size, depth, self.steps(config), size * (1 + config.rollout.max_refills)
        most, rule = config.pipeline.max_staleness, Admission if depth or not stream.goes_back else InAdvance
        admission = rule(*sizes) if most is None else Overtaking(*sizes, max_staleness=most)
        return Pipeline(stream, collector, admission, context, fixed=config.pipeline.schedule == "fixed")

    def evaluate(self, config: RunConfig, manager: PluginManager, started: Started, events: EventLoop) -> Evaluate | None:
        if self.held_out is None:
            return None
        evaluation = evaluation_of(config, manager, started, self.held_out, config.eval.data)
        return lambda step: events.run(evaluation.run(step))


def read_inputs(config: RunConfig, rows: PythonRows, manager: PluginManager, needs: Needs) -> Inputs:
    tokenizer = load_tokenizer(config.roles["actor"])
    check_inputs(config, manager, needs, tokenizer)
    if tells_the_day(tokenizer):
        for data in (config.data, config.eval.data):
            data.day = data.day or date.today().isoformat()  # another one after midnight would be another prompt
    phase("Reading data")
    if config.from_trajectories is not None or not needs.samples:
        return Inputs(config, tokenizer, find_data(config, needs).read(config, manager, needs, tokenizer, rows))
    tasks = tasks_of(config, config.data, "train", tokenizer, rows, manager)
    if AlgoNeeds.of(needs).unit_rows:
        prompt = max((len(task.prompt_ids or ()) for task in tasks.tasks), default=1)
        if (odd := refuse_large_answers(config, sizes(config.roles["actor"])[1], prompt)) is not None:
            log.warning("%s", odd)
    held_out = None
    if config.eval.data.sources:
        held_out = tasks_of(config, config.eval.data, "eval", tokenizer, rows, manager)
    return Inputs(config, tokenizer, TaskData(tasks, held_out))


def prompt_limit(config: RunConfig) -> int | None:
    """Longest prompt that leaves room for a token, in tokens; ``None``: nothing says."""
    limits = [limit for limit in (config.rollout.max_tokens, sizes(config.roles["actor"])[1]) if limit is not None]
    return min(limits) - 1 if limits else None


def tasks_of(
    config: RunConfig, data: DataConfig, split: Split, tokenizer: Any, rows: PythonRows, manager: PluginManager
) -> TaskSet:
    room, seed = prompt_limit(config), config.seed if split == "train" else config.eval.seed
    tasks = load_tasks(data, split=split, tokenizer=tokenizer, seed=seed, max_prompt_tokens=room, rows=rows, manager=manager)
    refuse_other_agents(tasks, data, manager)
    return tasks


def refuse_other_agents(tasks: TaskSet, data: DataConfig, manager: PluginManager) -> None:
    """Raises ``UserError`` for a task whose agent is not chosen."""
    agents = {item.alias for item in manager.loaded if item.kind == "agent"}
    for task in tasks.tasks if data.agent_key is not None and agents else ():
        if task.agent is not None and task.agent not in agents:
            asked = f"{task.source}, row {task.index + 1} asks for the agent {task.agent!r}"
            raise UserError(f"{asked}; the run has {', '.join(agents)}{near_matches(task.agent, agents)}")
