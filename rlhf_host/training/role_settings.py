"""Settings from which each role of a run is loaded and trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_host.config.schema import RoleConfig
from rlhf_host.errors import UserError
from rlhf_host.models.adapter_files import is_adapter, refuse_other_base
from rlhf_host.models.loading import weight_files
from rlhf_host.models.locations import with_base
from rlhf_host.records.needs import Needs, RoleNeed

ADAPTER_RATE = 10
"""The default learning rate of adapters, as a multiple of that of all weights (https://thinkingmachines.ai/blog/lora)."""


def role_settings(roles: Mapping[str, RoleConfig], need: RoleNeed, override: Path | None, needs: Needs) -> RoleConfig:
    """Returns the role's settings. The model is that of ``need.source`` (a role's name, or a path) if the role names none; the
    learning rate is that of ``need`` if the role sets none. A model that is an adapter becomes its base and the adapter.

    Args:
        roles: as configured.
        override: a checkpoint to load the weights from instead.
        needs: needs of the whole run; the role that ``need.source`` names may itself get its model from its source.

    Raises:
        UserError: no model is named anywhere, or an adapter was trained on another model.
    """
    settings = roles.get(need.name) or RoleConfig()
    if settings.model is None and need.source is not None:
        needed = next((other for other in needs.roles if other.name == need.source), None)
        origin = roles.get(need.source) if needed is None else role_settings(roles, needed, None, needs)
        inherited: dict[str, Any] = {"model": origin.model if origin else need.source}
        if origin:
            trusted = settings.trust_remote_code or origin.trust_remote_code
            adapter = settings.adapter or origin.adapter
            inherited |= {"revision": origin.revision, "trust_remote_code": trusted, "adapter": adapter}
            if not need.trainable:  # its weights are rounded as those it is compared with
                narrow = settings.dtype == "auto" and origin.dtype in ("bfloat16", "float16")
                inherited["dtype"] = origin.dtype if narrow and not need.moves else settings.dtype
                inherited["quantize"] = settings.quantize or origin.quantize
            inherited["tokenizer"] = settings.tokenizer or origin.tokenizer
        settings = settings.model_copy(update=inherited)
    settings = with_base(settings)
    if need.moves and settings.dtype == "auto":  # 16 bits would lose small movements
        settings = settings.model_copy(update={"dtype": "float32"})
    if override is not None:
        settings = settings.model_copy(update={"adapter" if is_adapter(override) else "model": str(override)})
        if need.moves:  # its files have what its source's adapter began with
            settings = settings.model_copy(update={"adapter": None})
    if need.trainable and (problem := _adapter_problem(need.name, settings, resumed=override is not None)):
        raise UserError(problem)
    if settings.lr is None:
        rate = ADAPTER_RATE * (need.lr or settings.peak_lr) if need.trainable and settings.adapts else need.lr
        settings = settings.model_copy(update={"lr": rate})
    if settings.model is None:
        raise UserError(f"the role {need.name} has no model; give --{need.name}.model DIRECTORY|HUB_NAME|FILE.gguf")
    if settings.adapter is not None:
        refuse_other_base(settings.adapter, settings.model, weight_files(settings))
    return settings


def _adapter_problem(name: str, settings: RoleConfig, *, resumed: bool) -> str | None:
    """Returns why a trained role cannot have these adapters, or none; None: it can.

    Args:
        resumed: the weights come from a checkpoint, where a new adapter became one with a directory.
    """
    if settings.adapter and settings.lora.rank and not resumed:
        return (
            f"the role {name} continues to train the adapter {settings.adapter}, so it cannot get a new one: leave lora.rank"
            f" out, or merge the adapter first (rlhf merge-lora {settings.adapter})"
        )
    if settings.adapter and (settings.freeze or settings.train_only):
        return f"the role {name} trains an adapter, and all its other weights are frozen: leave freeze and train_only out"
    cure = f"add --{name}.lora.rank 16, or leave"
    if settings.quantize and not settings.adapts:
        return f"the role {name} trains all its weights, which 4 bits cannot hold: {cure} quantize out"
    if settings.lora.dropout and not settings.adapts:
        return f"{name}.lora.dropout is {settings.lora.dropout:g}, and the role trains no adapter: {cure} it out"
    return None
