"""Checks of a checkpoint before a run is resumed from it."""

from __future__ import annotations

from pathlib import Path

import torch

from rlhf_host.config.run_dir import STATE
from rlhf_host.config.schema import RunConfig
from rlhf_host.errors import UserError
from rlhf_host.models.adapter_files import is_adapter
from rlhf_host.models.locations import find_model
from rlhf_host.records.needs import Needs
from rlhf_host.records.torch_files import OTHER
from rlhf_host.training.checkpoints import TRAINER, Checkpoint, load_checkpoint, model_written
from rlhf_host.training.role_settings import role_settings
from rlhf_host.training.trained_roles import check_state, models_of

STATE_KEYS = {"version", "best", "pending", "rates", "stopped", "stream", "plugins", "config"}


def with_saved_models(config: RunConfig, needs: Needs, run_dir: Path) -> RunConfig:
    """Returns the configuration with models of the newest checkpoint in place of those that are not found any more. It is for this
    process alone: what the run records keeps their names.

    Raises ``UserError`` for a role that needs such a model itself, since the checkpoint has no copy of it.
    """
    lost = {role.model: why for role in config.roles.values() if role.model and (why := _why_lost(role.model))}
    if not lost or (checkpoint := load_checkpoint(run_dir)) is None:
        return config
    saved = {name: path for name, path in models_of(needs, checkpoint.role).items() if not is_adapter(path)}
    for need in needs.roles:
        model = role_settings(config.roles, need, None, needs).model
        if model in lost and need.name not in saved:
            raise UserError(
                f"{lost[model]} (the role {need.name} needs it, and {checkpoint.path} has what was trained of it alone: put it"
                " back, or name another place with --force)"
            )
    roles = dict(config.roles)
    for name in saved.keys() & roles.keys():
        if roles[name].model in lost:
            roles[name] = roles[name].model_copy(update={"model": str(saved[name]), "revision": None})
    return config.model_copy(update={"roles": roles})


def _why_lost(model: str) -> str:
    """Returns why the model is not found; empty: it is."""
    try:
        find_model(model)
    except UserError as error:
        return str(error)
    return ""


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
