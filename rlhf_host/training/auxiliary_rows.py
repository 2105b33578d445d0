"""Rows that train beside the batch of a step, in losses of the plugin that gave them (``auxiliary_rows``)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_host.errors import RunError
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.episodes import Group
from rlhf_host.records.ragged import RaggedTensor, Rows
from rlhf_host.records.tensors import Experience, TopK

BESIDE = "beside"
"""Name of the mask of such rows, in ``batch.own`` of their plugin."""
OWN = ("completion_ids", "completion_mask", "turn_ids", "task_index", "truncated")
"""Fields that such rows have like any others. All masks but these leave them out, and what only sampled rows have is empty."""
NUMBERS = ("group_id", "episode_id", "unit_id")
UNKNOWN = ("plugin_rewards", "scores", "columns", "token_columns")
"""Fields in which nothing is NaN, not 0."""


def auxiliary_rows(manager: PluginManager, step: int, make: Callable[[Sequence[Group]], Experience]) -> dict[str, Experience]:
    """Returns the rows of each plugin that gives some, by its alias. Raises ``RunError`` for a row that cannot train.

    Args:
        make: makes tensors of groups.
    """
    found = {}
    for key, rows in manager.each("auxiliary_rows", step=step):
        alias, groups = manager.by_key[key].alias, []
        for number, row in enumerate(rows):
            if not row.prompt_ids or not row.action_length:
                raise RunError(f"{key}: auxiliary_rows gave a row without a prompt, or without an action, whose tokens train")
            name = f"{alias}-{number}"
            alone = dataclasses.replace(row, group_id=name, episode_id=name, parent=None)
            groups.append(Group(name, row.task, [alone]))
        if groups:
            found[alias] = make(groups)
    return found


def no_rows(experience: Experience, manager: PluginManager) -> None:
    """Adds, in place, the mask of such rows for each plugin that may give some. Raises ``RunError`` if a plugin has one itself."""
    for key in manager.names("auxiliary_rows"):
        own = experience.extra.setdefault(manager.by_key[key].alias, {})
        if BESIDE in own:
            raise RunError(
                f"{key} gave {BESIDE!r} from prepare_batch, which is the mask of auxiliary_rows: give it another name"
            )
        own[BESIDE] = torch.zeros_like(experience.action_mask)


def joined(batch: Experience, rows: Experience, alias: str) -> Experience:
    """Returns the batch with further rows behind its own. Their action tokens are in no mask but ``Extra("beside")`` of the plugin
    ``alias``, which the batch has already (``no_rows``).
    """
    parts = [Rows.of(each.completion_mask) for each in (batch, rows)]
    shape = Rows(np.concatenate([part.lengths for part in parts]), max(part.width for part in parts))

    def put(name: str, mine: Any, theirs: Any = None) -> Any:
        """Returns a field's values for all rows; of those that have none they are empty."""
        if isinstance(mine, TopK):
            return TopK(*(put(name, each) for each in mine))
        known = theirs if mine is None else mine
        if not isinstance(known, Tensor) or not known.shape or len(known) not in (len(batch), len(rows)):
            return mine
        empty = math.nan if name in UNKNOWN else -1 if name == "parent" else 0
        timed = known.dim() > 1 and known.shape[1] == (batch if mine is not None else rows).completion_mask.shape[1]
        if not timed or name == "plugin_rewards":
            sizes = (len(batch), len(rows))
            values = [
                known.new_full((size, *known.shape[1:]), empty) if each is None else each
                for each, size in zip((mine, theirs), sizes, strict=True)
            ]
            return torch.cat(values)
        tokens = [
            known.new_full((part.count, *known.shape[2:]), empty) if each is None else part.tokens(each)
            for each, part in zip((mine, theirs), parts, strict=True)
        ]
        return RaggedTensor(torch.cat(tokens), shape, -1 if name == "turn_ids" else 0, known.dtype)

    changes: dict[str, Any] = {}
    for field in dataclasses.fields(Experience):
        name, mine, theirs = field.name, getattr(batch, field.name), getattr(rows, field.name)
        if name in NUMBERS:
            changes[name] = put(name, mine, theirs + int(mine.max()) + 1)
        elif name in ("columns", "token_columns"):
            changes[name] = {key: put(name, mine.get(key), theirs.get(key)) for key in {**mine, **theirs}}
        elif name == "extra":
            changes[name] = {one: {key: put(name, each) for key, each in own.items()} for one, own in mine.items()}
        elif isinstance(mine, Mapping) and name not in ("prompts", "rows", "stats", "own"):
            changes[name] = {key: put(name, each) for key, each in mine.items()}
        elif isinstance(mine, Tensor):
            changes[name] = put(name, mine, theirs if name in OWN else None)
    changes["extra"][alias][BESIDE] = put(BESIDE, batch.extra[alias][BESIDE], rows.action_mask)
    changes["prompt_ids"] = [*batch.prompt_ids, *rows.prompt_ids]
    changes["prompts"] = {role: [*prompts, *rows.prompt_ids] for role, prompts in batch.prompts.items()}
    others = [*range(len(batch)), *[0] * len(rows)]  # the rows beside have any: no mask of the batch has them
    changes["rows"] = {role: seen.select(others) for role, seen in batch.rows.items()}
    changes["trajectories"] = [*batch.trajectories, *rows.trajectories]
    for name, none in (("images", ()), ("traces", {})):
        if (own := [getattr(each, name) for each in (batch, rows)]) != [None, None]:
            changes[name] = [*(own[0] or [none] * len(batch)), *(own[1] or [none] * len(rows))]
    return dataclasses.replace(batch, **changes)
