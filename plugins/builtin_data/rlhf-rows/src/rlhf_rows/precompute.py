"""``--ROLE.precompute``: log-probabilities of a frozen role over a data set, computed before the run, which then does not load
that model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from rlhf_host import Batch
from rlhf_host.commands import phase
from rlhf_host.internals import counted
from rlhf_rows.frozen_role import FrozenRole
from rlhf_rows.stored_logprobs import VERSION, StoredLogprobs, find_logprobs, store_logprobs


def precomputed(role: FrozenRole, rows: Mapping[str, Any], batches: Iterator[Batch]) -> StoredLogprobs:
    """Returns the role's log-probabilities: stored by an earlier run, or computed now.

    Args:
        rows: what the rows depend on, as JSON values.
        batches: every row that the run will see.
    """
    settings = {"version": VERSION, **role.settings(), **rows}
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
    name = role.need.name
    if (known := find_logprobs(key)) is not None:
        phase(f"Using the log-probabilities of {name} that an earlier run stored")
        return known
    with role.loaded() as logprobs:

        def computed() -> Iterator[tuple[Batch, Tensor]]:
            for batch in batches:
                yield batch, logprobs(batch)

        line = f"log-probabilities of {name}: {{task.completed:,.0f}} rows"
        return store_logprobs(key, counted(computed(), line, lambda pair: len(pair[0])))
