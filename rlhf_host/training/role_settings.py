"""What each role of a run is loaded from and trained with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_host.config.schema import RoleConfig
from rlhf_host.errors import UserError
from rlhf_host.records.needs import Needs, RoleNeed


def role_settings(roles: Mapping[str, RoleConfig], need: RoleNeed, override: Path | None, needs: Needs) -> RoleConfig:
    """The role's own settings, with the model of ``need.source`` (a role's name, or a path) where it names none, and the
    learning rate of ``need`` where it sets none.

    Args:
        roles: as configured.
        override: where its weights come from instead: a checkpoint.
        needs: of the whole run: the role that ``need.source`` names may have its model from its own source.

    Raises:
        UserError: when no model is named anywhere.
    """
    settings = roles.get(need.name) or RoleConfig()
    if settings.lr is None:
        settings = settings.model_copy(update={"lr": need.lr})
    if settings.model is None and need.source is not None:
        needed = next((other for other in needs.roles if other.name == need.source), None)
        origin = roles.get(need.source) if needed is None else role_settings(roles, needed, None, needs)
        inherited: dict[str, Any] = {"model": origin.model if origin else need.source}
        if origin:
            trusted = settings.trust_remote_code or origin.trust_remote_code
            inherited |= {"revision": origin.revision, "trust_remote_code": trusted}
        settings = settings.model_copy(update=inherited)
    if override is not None:
        settings = settings.model_copy(update={"model": str(override)})
    if settings.model is None:
        raise UserError(f"the role {need.name} has no model; give --{need.name}.model DIRECTORY|HUB_NAME|FILE.gguf")
    return settings
