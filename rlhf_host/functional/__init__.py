"""Pure tensor functions that algorithms share. Importing this loads no torch; the first function used does."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlhf_host.functional.options import PolicyLossOptions

if TYPE_CHECKING:
    from rlhf_host.functional.kl import kl_estimate, kl_loss
    from rlhf_host.functional.policy import importance_ratio, policy_loss, policy_losses
    from rlhf_host.functional.statistics import (
        group_mean,
        group_sizes,
        leave_one_out,
        masked_mean,
        masked_sum,
        on_actions,
        suffix_sum,
    )

_HOME = {
    "group_mean": "statistics",
    "group_sizes": "statistics",
    "importance_ratio": "policy",
    "kl_estimate": "kl",
    "kl_loss": "kl",
    "leave_one_out": "statistics",
    "masked_mean": "statistics",
    "masked_sum": "statistics",
    "on_actions": "statistics",
    "policy_loss": "policy",
    "policy_losses": "policy",
    "suffix_sum": "statistics",
}

__all__ = [
    "PolicyLossOptions",
    "group_mean",
    "group_sizes",
    "importance_ratio",
    "kl_estimate",
    "kl_loss",
    "leave_one_out",
    "masked_mean",
    "masked_sum",
    "on_actions",
    "policy_loss",
    "policy_losses",
    "suffix_sum",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
