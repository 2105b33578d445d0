"""The most telling figure of a run as text, with what must be read beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_host import RunDirectory
from rlhf_host.runs import beside, figure


def last_row(run: RunDirectory, name: str) -> Mapping[str, Any]:
    """Returns the last row of ``metrics.jsonl`` that has a metric."""
    step = run.curve(name)[0][-1]
    return next(row for row in run.metrics if row["step"] == step)


def told(run: RunDirectory, name: str, form: str = ".4g") -> str:
    """Returns a metric at the end of a run: its value, its 95 % interval, and the share of the episodes that failed."""
    row = last_row(run, name)
    return "; ".join(part for part in (figure(row, name, form), beside(row, name)) if part)
