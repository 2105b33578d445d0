"""Columns that tell which part of a whole row is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_host.internals import TRAINED_BY, UNTRAINED_BY, Malformed, is_empty
from rlhf_rows.token_rows import TRAINED_BY as TOKENS_TRAINED_BY
from rlhf_rows.token_rows import UNTRAINED_BY as TOKENS_UNTRAINED_BY

WEIGHTS: Mapping[str, Any] = {
    **dict.fromkeys(("weight", "loss_weight", "sample_weight", "loss_mask", "loss_scale"), 1),
    **dict.fromkeys(("train_on_inputs", "train_on_input", "train_on_prompt", "mask_history"), False),
    **dict.fromkeys(("last_turn_only", "train_on_last_turn", "train_on_last_turn_only"), False),
    **dict.fromkeys(("mask_prompt", "assistant_only_loss", "completion_only_loss", "train_on_completions_only"), True),
}
"""Columns that tell which part of a whole row is trained → the only accepted value, which is the behaviour without them."""
MASK = "mask"
"""In some projects, the speaker whose turns are not trained."""
PEOPLE = ("human", "user")
TRAINING = frozenset((*WEIGHTS, MASK, *TRAINED_BY, *UNTRAINED_BY, *TOKENS_TRAINED_BY, *TOKENS_UNTRAINED_BY, "masks"))
"""The same, with marks of messages and tokens; a row may have a list of these."""


def refuse_weights(row: Mapping[str, Any]) -> None:
    """Raises ``Malformed`` for a column that tells which part of the row is trained, if it differs from the actual behaviour."""
    if TRAINING.isdisjoint(row):
        return
    for name in filter(TRAINING.__contains__, row):
        value = row[name]
        if (
            is_empty(value)
            or (name in WEIGHTS and _plainly(value) == WEIGHTS[name])
            or (name == MASK and _speaker(value) in PEOPLE)
        ):
            continue
        untrained = _plainly(value) is (name in UNTRAINED_BY)  # other values, such as a loss, are about something else
        if name in WEIGHTS or name == MASK or untrained or isinstance(value, list | tuple):
            raise Malformed(
                f"{name!r} is {value!r}, which cannot be done for a whole row: mark messages, leave the row out, or leave it unread"
                f" (data.ignore {name})"
            )


def _plainly(value: Any) -> Any:
    """Converts a value of a table that holds only texts."""
    return (
        {"1": 1, "1.0": 1, "true": True, "false": False, "0": 0}.get(value.lower(), value) if isinstance(value, str) else value
    )


def _speaker(value: Any) -> str:
    return value.lower() if isinstance(value, str) else ""
