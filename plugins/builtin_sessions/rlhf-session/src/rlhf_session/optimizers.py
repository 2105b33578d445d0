"""Settings that single calls of a session change: those of sampling, and of an optimizer that is at work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rlhf_host import UserError

S = TypeVar("S", bound=BaseModel)

SAMPLING = ("top_p", "top_k", "min_p", "stop", "stop_token_ids")
OPTIMIZER = ("betas", "adam_eps", "weight_decay", "max_grad_norm")


def changed(settings: S, given: Mapping[str, Any], known: Sequence[str], call: str) -> S:
    """Returns settings with some of them changed. Raises ``UserError`` for others than ``known``, and for wrong values.

    Args:
        call: the method that was called, for messages.
    """
    if odd := [name for name in given if name not in known]:
        raise UserError(f"{call} has no argument {odd[0]!r}; it takes {', '.join(known)}")
    if not given:
        return settings
    own = {name: getattr(settings, name) for name in type(settings).model_fields}
    try:
        type(settings).model_validate({name: own[name] for name in known} | dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{call}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    return settings.model_copy(update=dict(given))


def optimizer_of(trainer: Any, role: str) -> tuple[Any, list[dict[str, Any]]]:
    """Returns a role's backend and its optimizer's groups. Raises ``UserError`` where that is not AdamW in this process."""
    worker = getattr(trainer, "worker", None)
    backend = None if worker is None else worker.roles[role].backend
    groups = getattr(getattr(backend, "optimizer", None), "param_groups", None)
    if backend is None or groups is None or any(not {"betas", "eps", "weight_decay"} <= set(group) for group in groups):
        raise UserError(f"the optimizer of {role} is not AdamW in this process, so a call cannot change it: give settings")
    return backend, groups


def set_optimizer(trainer: Any, role: str, given: Mapping[str, Any]) -> None:
    """Changes settings of a role's optimizer. Raises ``UserError`` as ``optimizer_of`` and ``changed``."""
    backend, groups = optimizer_of(trainer, role)
    backend.role = role_settings = changed(backend.role, given, OPTIMIZER, "optim_step")
    for group in groups:
        decayed = any(weight.dim() > 1 for weight in group["params"])
        group["betas"], group["eps"] = tuple(role_settings.betas), role_settings.adam_eps
        group["weight_decay"] = role_settings.weight_decay if decayed else 0.0
