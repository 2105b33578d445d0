"""Evaluation of a model that is not trained."""

from __future__ import annotations

from pathlib import Path

from rlhf_host.config.schema import RunConfig
from rlhf_host.data.sources import NO_ROWS
from rlhf_host.models.loading import load_tokenizer
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.protocols.data import PythonRows
from rlhf_host.training.inputs import tasks_of
from rlhf_host.training.saved_rows import SavedStep, TrajectoryFile
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
    file = None if output is None else TrajectoryFile(output)
    data = config.eval.data if config.eval.data.sources else config.data
    tokenizer = load_tokenizer(config.roles["actor"])
    held_out = tasks_of(config, data, "eval", tokenizer, rows, manager)
    with session(config, manager, tokenizer=tokenizer) as running:
        metrics, trajectories = running.run(running.evaluation(held_out, data).run(0))
        manager.each("log_trajectories", step=0, split="eval", trajectories=trajectories)
        if file is not None:
            file.add(SavedStep.of(config, 0, "eval", trajectories))
            file.write()
        running.outcome.metrics = metrics
    return metrics
