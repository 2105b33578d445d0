"""Finished groups that are not trained yet, as files of a checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rlhf_host.data.pictures import keep
from rlhf_host.records.episodes import Group
from rlhf_host.rollouts.collect import Played
from rlhf_host.training.saved_rows import lines, read_steps

ROWS, STATES = "pending.jsonl", "pending.json"


def write_untrained(finished: Mapping[int, Played], directory: Path) -> None:
    """Writes finished groups.

    Args:
        finished: by ordinal, as in ``Pipeline.finished``.
    """
    if finished:
        rows = (
            lines(ordinal, "train", [*one.group.trajectories, *one.failed], {}, directory) for ordinal, one in finished.items()
        )
        (directory / ROWS).write_bytes(b"".join(rows))
        states = {ordinal: one.states for ordinal, one in finished.items()}
        (directory / STATES).write_text(json.dumps(states))


def read_untrained(directory: Path) -> dict[int, Played]:
    """Reads what ``write_untrained`` wrote, with stand-ins for tasks; nothing if it wrote nothing."""
    if not (directory / ROWS).exists():
        return {}
    states = json.loads((directory / STATES).read_text())
    played = {}
    for step in read_steps(directory / ROWS):
        for segment in (segment for row in step.rows for segment in row.segments):
            segment.images = [keep(replace(each, path=None, data=each.read())) for each in segment.images]  # it may be removed
        failed = [row for row in step.rows if row.finish_reason == "abort" and row.reward is None and not row.actions]
        rows = [row for row in step.rows if not any(row is one for one in failed)]
        group = Group(step.rows[0].group_id, step.rows[0].task, rows)
        played[step.step] = Played(group, failed, Counter(states[str(step.step)]))
    return played
