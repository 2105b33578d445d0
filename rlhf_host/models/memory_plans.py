"""Memory of roles' passes: decisions of packages about what they keep (``rlhf.memory_plans``), and the error where it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rlhf_host.config.schema import TrainConfig
from rlhf_host.config.tree import role_flag
from rlhf_host.errors import RunError, blaming
from rlhf_host.plugins.discovery import unchosen
from rlhf_host.plugins.selection import imported
from rlhf_host.protocols import Ranks

Plan = Callable[[Any], AbstractContextManager[Any]]
"""Role → what its passes of one update run in. Collective over ranks."""


def memory_plan(roles: Mapping[str, Any], train: TrainConfig, ranks: Ranks) -> Plan:
    """Returns the plan of the first package, if layers or logits are left to it; else one that decides nothing.

    A package takes part with an entry point in the group ``rlhf.memory_plans``: a callable with the arguments of this function. Its
    plan may set ``passes.recompute`` and ``passes.keep_logits`` of roles with the setting ``auto``, equally on all ranks.
    """
    on_gpus = any(role.passes.device.type == "cuda" for role in roles.values())
    asked = any(role.settings is not None and role.settings.gradient_checkpointing == "auto" for role in roles.values())
    for info in unchosen("memory_plan") if asked or (on_gpus and train.keep_logits == "auto") else ():
        with blaming(str(info), "its call"):
            plan: Plan = imported(info)(roles, train, ranks)
            return plan
    return nullcontext


def out_of_memory(role: Any, cause: Exception) -> RunError:
    """Returns an error that names the settings that need less memory."""
    (count, depth), name = role.passes.recomputed, role_flag(role.name)
    auto = ", chosen by auto" if role.settings is not None and role.settings.gradient_checkpointing == "auto" else ""
    way = f"set --{name}.gradient-checkpointing true, or lower" if count < depth else "lower"
    error = RunError(
        f"{role.name}: out of memory in a pass that recomputes {count} of {depth} layers{auto}: {way}"
        " --train.max-tokens-per-microbatch; rlhf train --resume goes on with that"
    )
    error.__cause__ = cause
    return error
