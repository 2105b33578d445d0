"""Inputs of a run, read before anything is written: tokenizer, tasks, rows, saved trajectories."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, Literal

from rlhf_host.config.schema import DataConfig, RunConfig
from rlhf_host.data.sources import PythonRows, load_tasks
from rlhf_host.data.stream import TaskSet
from rlhf_host.data.templates import tells_the_day
from rlhf_host.errors import UserError, near_matches
from rlhf_host.models.loading import load_tokenizer, sizes, stop_tokens
from rlhf_host.phases import phase
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.needs import AlgoNeeds, Needs
from rlhf_host.training.batching import refuse_large_answers, refuse_large_units
from rlhf_host.training.rehearsal import check_inputs

if TYPE_CHECKING:  # imported where a run trains on rows, or on saved trajectories
    from rlhf_host.data.units import UnitSet
    from rlhf_host.training.saved_rollouts import SavedRollouts

log = logging.getLogger(__name__)

STEPS = 100
"""Steps of a run that samples and says no number."""
FIRST = 1000
"""Tasks, or rows, of each source that are looked at for pictures before a run starts."""


@dataclass(slots=True)
class Inputs:
    """Parts that are read before anything is written."""

    tokenizer: Any
    tasks: TaskSet | None = None
    held_out: TaskSet | None = None
    saved: SavedRollouts | None = None
    """In the place of tasks."""
    units: UnitSet | None = None
    """In the place of tasks, for algorithms that train on rows."""
    held_out_units: UnitSet | None = None

    @property
    def pictured(self) -> bool:
        """True if some of the first tasks, or rows, of a source have pictures."""
        if self.units is not None:
            return any(row.images for units in self.units.sources.values() for unit in units[:FIRST] for row in unit.rows)
        known = [] if self.tasks is None else [each for each in self.tasks.sources.values() if isinstance(each, Sequence)]
        return any(task.images for tasks in known for task in tasks[: FIRST if isinstance(tasks, list) else 1])

    @property
    def notices(self) -> list[str]:
        held_out = [line for source in (self.held_out, self.held_out_units) if source is not None for line in source.report]
        sources = (self.tasks, self.saved, self.units)
        lines = [line for source in sources if source is not None for line in source.report]
        return lines + [f"held out: {line}" for line in held_out]

    def steps(self, config: RunConfig) -> int:
        """Returns the number of steps of the whole run."""
        if config.train.steps is not None:
            return config.train.steps
        if self.units is None:
            return STEPS if self.saved is None else self.saved.steps
        return math.ceil(math.ceil(len(self.units) * config.data.epochs) / config.train.batch_size)


def read_inputs(config: RunConfig, rows: PythonRows, manager: PluginManager, needs: Needs) -> Inputs:
    tokenizer = load_tokenizer(config.roles["actor"])
    check_inputs(config, manager, needs, tokenizer)
    if tells_the_day(tokenizer):
        for data in (config.data, config.eval.data):
            data.day = data.day or date.today().isoformat()  # another one after midnight would be another prompt
    phase("Reading data")
    if not needs.samples:
        return _read_units(config, rows, needs, tokenizer)
    if config.from_trajectories is not None:
        from rlhf_host.training.saved_rollouts import SavedRollouts
        from rlhf_host.training.saved_rows import check_vocabulary

        saved = SavedRollouts(config)
        check_vocabulary(saved.saved, config.roles["actor"])
        return Inputs(tokenizer, saved=saved)
    tasks = tasks_of(config, config.data, "train", tokenizer, rows, manager)
    if AlgoNeeds.of(needs).unit_rows:
        prompt = max((len(task.prompt_ids or ()) for task in tasks.tasks), default=1)
        if (odd := refuse_large_answers(config, sizes(config.roles["actor"])[1], prompt)) is not None:
            log.warning("%s", odd)
    held_out = None
    if config.eval.data.sources:
        held_out = tasks_of(config, config.eval.data, "eval", tokenizer, rows, manager)
    return Inputs(tokenizer, tasks, held_out)


def _read_units(config: RunConfig, rows: PythonRows, needs: Needs, tokenizer: Any) -> Inputs:
    actor = config.roles["actor"]
    context, stop_ids = sizes(actor)[1], stop_tokens(actor)
    reading = UnitReading(tokenizer=tokenizer, needs=needs, rows=rows, max_tokens=context, stop_ids=stop_ids)
    units = units_of(config, config.data, "train", reading)
    held_out_units = units_of(config, config.eval.data, "eval", reading) if config.eval.data.sources else None
    scalar = any(need.name == "actor" and need.head == "scalar" for need in needs.roles)
    for each in (units, held_out_units) if AlgoNeeds.of(needs).unit_rows else ():
        if each is not None:
            refuse_large_units(each, config.train, scalar=scalar)
    return Inputs(tokenizer, units=units, held_out_units=held_out_units)


def prompt_room(config: RunConfig) -> int | None:
    """Longest prompt that leaves room for a token, in tokens; ``None``: nothing says."""
    limits = [limit for limit in (config.rollout.max_tokens, sizes(config.roles["actor"])[1]) if limit is not None]
    return min(limits) - 1 if limits else None


def tasks_of(
    config: RunConfig,
    data: DataConfig,
    split: Literal["train", "eval"],
    tokenizer: Any,
    rows: PythonRows,
    manager: PluginManager,
) -> TaskSet:
    room, seed = prompt_room(config), config.seed if split == "train" else config.eval.seed
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


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitReading:
    """Reader of rows of any split as units of training."""

    tokenizer: Any
    needs: Needs
    rows: PythonRows
    max_tokens: int | None
    """The model's context."""
    stop_ids: Sequence[int]
    """Tokens that end its turns, beside the tokenizer's own."""


def units_of(config: RunConfig, data: DataConfig, split: Literal["train", "eval"], reading: UnitReading) -> UnitSet:
    from rlhf_host.data.load_units import load_units

    needs = reading.needs
    assert needs.data is not None
    assert config.algo is not None
    return load_units(
        data,
        kind=needs.data,
        split=split,
        tokenizer=reading.tokenizer,
        max_tokens=reading.max_tokens,
        rows=reading.rows,
        needed_by=config.algo.name,
        stop_ids=reading.stop_ids,
        separator="\n" if (text := AlgoNeeds.of(needs).separator) is None else text,
    )
