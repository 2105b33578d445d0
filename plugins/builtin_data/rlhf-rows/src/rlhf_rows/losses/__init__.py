"""Losses of pairs and of single answers, for algorithms. Importing this loads no torch; the first function used does."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlhf_rows.losses.options import (
    REFERENCE,
    PreferenceLossName,
    PreferenceOptions,
    SupervisedOptions,
    preference_needs,
)

if TYPE_CHECKING:
    from rlhf_rows.losses.preference import chosen_tokens, on_rows, pairs, preference_loss, preference_losses, prepared_pairs
    from rlhf_rows.losses.supervised import supervised_loss

__all__ = [
    "REFERENCE",
    "PreferenceLossName",
    "PreferenceOptions",
    "SupervisedOptions",
    "chosen_tokens",
    "on_rows",
    "pairs",
    "preference_loss",
    "preference_losses",
    "preference_needs",
    "prepared_pairs",
    "supervised_loss",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "supervised" if name == "supervised_loss" else "preference"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
