"""Prompts sampled and scored without training: as the first steps of a run, or all of the data once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_host import Task, UserError
from rlhf_host.models import load_tokenizer
from rlhf_host.sampling import session, tasks_of
from rlhf_host.settings import RunConfig

if TYPE_CHECKING:
    from rlhf_host.internals import PluginManager
    from rlhf_host.sampling import Collected


def sample_steps(
    config: RunConfig,
    manager: PluginManager,
    prompts: Sequence[int],
    each: Callable[[int, Collected], None],
    rows: Mapping[str, Iterable[Mapping[str, Any]]],
) -> None:
    """Samples and scores as the first steps of a run would, without changing the weights.

    Without rewards, draws the requested number of prompts; all trajectories are unjudged.

    Args:
        prompts: number of groups to keep, per step.
        each: called with every step as it finishes.
        rows: rows in memory that the data names.

    Raises:
        KeyboardInterrupt: when asked to stop; the steps that ``each`` received are complete.
    """
    tokenizer = load_tokenizer(config.roles["actor"])
    tasks = tasks_of(config, config.data, "train", tokenizer, rows, manager)
    with session(config, manager, tokenizer=tokenizer, tasks=tasks) as running:
        for step, wanted in enumerate(prompts, start=1):
            each(step, running.sample(step, wanted))
            running.outcome.step = step


def answer_all(
    config: RunConfig,
    manager: PluginManager,
    begin: Callable[[Sequence[Task]], int],
    each: Callable[[int, int, Collected], None],
) -> None:
    """Samples and scores answers to every prompt once, in the data's order, in batches of ``train.batch_size`` prompts.

    Args:
        begin: called with all tasks; returns how many of the first to skip.
        each: called with every finished batch: its number of prompts, the number of all prompts, the collected groups.

    Raises:
        KeyboardInterrupt: when asked to stop; the batches that ``each`` received are complete.
    """
    tokenizer = load_tokenizer(config.roles["actor"])
    tasks = tasks_of(config, config.data, "train", tokenizer, {}, manager).tasks
    if not tasks:
        raise UserError("the data has no prompts that can be counted: give a file or a hub name")
    done, size = begin(tasks), config.train.batch_size
    with session(config, manager, tokenizer=tokenizer) as running:
        for first in range(done, len(tasks), size):
            batch, step = tasks[first : first + size], first // size + 1
            each(len(batch), len(tasks), running.answer(step, batch))
            running.outcome.step = step
