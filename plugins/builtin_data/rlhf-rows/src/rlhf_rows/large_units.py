"""Check that rows which must stay together fit into a micro-batch."""

from __future__ import annotations

import numpy as np

from rlhf_host import UserError
from rlhf_host.internals import WORTHWHILE
from rlhf_host.settings import TrainConfig
from rlhf_rows.unit_store import unit_lengths
from rlhf_rows.units import UnitSet


def refuse_large_units(units: UnitSet, train: TrainConfig, *, scalar: bool) -> None:
    """Raises ``UserError`` if rows that must stay together cost more than a micro-batch may, in the layout of a training step.
    This check runs before training, so that no run ends there.

    Args:
        scalar: the model has a scalar head, so that the last token is computed too.
    """
    for name, source in units.sources.items():
        lengths = unit_lengths(source).astype(np.int64)
        prompts, completions = lengths[:, 0, 0], lengths[:, :, 1] - (not scalar)
        line = prompts + completions.sum(1)
        costs = padded = lengths.shape[1] * (prompts + completions.max(1))
        if train.shared_prefix != "off":
            costs = line if train.shared_prefix == "on" else np.where(line <= WORTHWHILE * padded, line, padded)
        number = int(costs.argmax())
        if costs[number] > train.max_tokens_per_microbatch:
            row = source[number].rows[0]
            raise UserError(
                f"{name}: pair {number + 1:,} (a prompt of {len(row.prompt_ids):,} tokens, answers of"
                f" {' and '.join(f'{length:,}' for length in lengths[number, :, 1])}) costs {costs[number]:,} tokens, and its rows"
                f" must stay together: set --train.max-tokens-per-microbatch {costs[number]} or more"
                f" (now {train.max_tokens_per_microbatch}), or a smaller --data.max-tokens"
            )
