"""Checks of a checkpoint before a run is resumed from it."""

from __future__ import annotations

from pathlib import Path

import torch

from rlhf_host.config.run_dir import STATE
from rlhf_host.config.schema import RunConfig
from rlhf_host.errors import UserError
from rlhf_host.records.needs import Needs
from rlhf_host.records.torch_files import OTHER
from rlhf_host.training.checkpoints import TRAINER, Checkpoint, model_written
from rlhf_host.training.trained_roles import check_state

STATE_KEYS = {"version", "best", "pending", "rates", "stopped", "stream", "plugins", "config"}


def refuse_foreign(checkpoint: Checkpoint) -> None:
    """Raises ``UserError`` for a checkpoint whose hashes are right but whose content is not what a run writes."""
    if (lacking := sorted(STATE_KEYS - checkpoint.state.keys())) or not isinstance(checkpoint.state["stream"], dict):
        what = f"{STATE} needs {' and '.join(lacking or ['stream'])}"
    elif not _is_like(checkpoint.tensors["torch_rng"], torch.get_rng_state()):
        what = f"{TRAINER} has no random state of PyTorch"
    else:
        return
    raise UserError(f"{checkpoint.path} was not written by a run ({what}): {OTHER}")


def _is_like(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.dtype == other.dtype and tensor.shape == other.shape


def refuse_lost(config: RunConfig, needs: Needs, checkpoint: Checkpoint) -> None:
    """Raises ``UserError`` if this run could not use something in the checkpoint: optimizers, or draws."""
    check_state(checkpoint.optimizers, needs)
    if (then := checkpoint.state["config"]["backend"]["name"]) != (now := config.backend.name):
        raise UserError(
            f"{checkpoint.path} was written by the backend {then}, and {now} cannot read it: resume with --backend {then}"
        )
    stream = checkpoint.state["stream"]
    if stream.get("passed") and config.pipeline.max_staleness is None:
        raise UserError(
            "this run trained tasks out of order; resuming it without pipeline.max_staleness would skip some: resume it with"
            f" --async-depth 1 --pipeline.max-staleness {max(2, stream['max_age'])}"
        )


def refuse_finished(config: RunConfig, checkpoint: Checkpoint, run_dir: Path, end: tuple[int | None, str]) -> None:
    """Raises ``UserError`` if nothing is left to do, or the run was of another kind.

    Args:
        end: as ``GivenData.end``; no number where the data is not read yet.
    """
    before, now_saved = "trajectories" in checkpoint.state["stream"], config.from_trajectories is not None
    if before != now_saved:
        then, now = ("from saved trajectories", "sampling") if before else ("sampling", "from saved trajectories")
        raise UserError(
            f"{run_dir} was trained {then}, and cannot continue {now}: start a new run with --actor.model {run_dir}/model"
        )
    if checkpoint.state["pending"] is not None or (config.checkpoint.final and not model_written(run_dir, checkpoint)):
        return
    if (reason := checkpoint.state["stopped"]) is not None:
        raise UserError(
            f"{run_dir} was stopped after step {checkpoint.step} by {reason}; to train further, start a new run with"
            f" --actor.model {checkpoint.role('actor')}"
        )
    last, told = end
    if last is not None and checkpoint.step >= last:
        raise UserError(f"{run_dir} is finished at step {checkpoint.step}{told}")
