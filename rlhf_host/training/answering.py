"""Sampling, scoring and evaluation without training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rlhf_host.config.resolve import merge_needs
from rlhf_host.config.schema import RunConfig
from rlhf_host.data.sources import NO_ROWS, PythonRows
from rlhf_host.data.stream import Draw
from rlhf_host.errors import UserError
from rlhf_host.models.loading import load_tokenizer
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.episodes import Task
from rlhf_host.records.needs import ScoreContext
from rlhf_host.rollouts.collect import Collected
from rlhf_host.training import assemble
from rlhf_host.training.inputs import tasks_of
from rlhf_host.training.records import provenance
from rlhf_host.training.saved_rows import check_output, lines, write_lines
from rlhf_host.training.session import session


def evaluate_only(
    config: RunConfig, manager: PluginManager, output: Path | None = None, *, rows: PythonRows = NO_ROWS
) -> dict[str, float]:
    """Evaluate the actor on ``eval.data``; see ``training.evaluate``.

    Args:
        output: a file for all trajectories, with their tokens.

    Raises:
        UserError: ``output`` exists already, or could not be read back.
    """
    if output is not None:
        check_output(output)
    data = config.eval.data if config.eval.data.sources else config.data
    tokenizer = load_tokenizer(config.roles["actor"])
    held_out = tasks_of(config, data, "eval", tokenizer, rows, manager)
    with session(config, manager, tokenizer=tokenizer) as running:
        metrics, trajectories = running.run(running.evaluation(held_out, data).run(0))
        manager.each("log_trajectories", step=0, split="eval", trajectories=trajectories)
        if output is not None:
            origin = provenance(config.model_dump(mode="json"), "eval")
            write_lines(output, [lines(0, "eval", trajectories, origin, output.parent)])
        running.outcome.metrics = metrics
    return metrics


def rollout_only(
    config: RunConfig,
    manager: PluginManager,
    prompts: Sequence[int],
    each: Callable[[int, Collected], None],
    *,
    rows: PythonRows = NO_ROWS,
) -> None:
    """Samples and scores as the first steps of a run would, without changing the weights.

    Without rewards, draws the requested number of prompts; all trajectories are unjudged.

    Args:
        prompts: number of groups to keep, per step.
        each: called with every step as it finishes.

    Raises:
        KeyboardInterrupt: when asked to stop; the steps that ``each`` received are complete.
    """
    tokenizer = load_tokenizer(config.roles["actor"])
    tasks = tasks_of(config, config.data, "train", tokenizer, rows, manager)
    stream = assemble.stream_of(config, manager, tasks)

    async def unjudged(step: int, wanted: int) -> Collected:
        collected = Collected()
        await collector.run(stream.draw(wanted, step), ScoreContext("train", step), collected)
        return collected

    with session(config, manager, tokenizer=tokenizer) as running:
        collector = running.collector()
        judged = collector.judges or not merge_needs(manager).rewards
        if not judged:
            collector.settings = collector.settings.model_copy(update={"max_unjudged": 1.0})
        for step, wanted in enumerate(prompts, start=1):
            context = ScoreContext("train", step, running.roles, tokenizer)
            draw = partial(stream.draw, step=step)
            each(step, running.run(collector.fill(draw, wanted, context) if judged else unjudged(step, wanted)))
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
    tasks = tasks_of(config, config.data, "train", tokenizer, NO_ROWS, manager).tasks
    if not tasks:
        raise UserError("the data has no prompts that can be counted: give a file or a hub name")
    done, size = begin(tasks), config.train.batch_size
    with session(config, manager, tokenizer=tokenizer) as running:
        collector = running.collector()
        for first in range(done, len(tasks), size):
            draws, collected, step = [Draw(task, 0) for task in tasks[first : first + size]], Collected(), first // size + 1
            running.run(collector.run(draws, ScoreContext("train", step, running.roles, tokenizer), collected))
            each(len(draws), len(tasks), collected)
            running.outcome.step = step
