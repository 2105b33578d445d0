"""Trajectories as JSON lines, written aside and renamed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlhf_host.types import Trajectory


def record(trajectory: Trajectory, *, tokens: bool = False) -> dict[str, Any]:
    """One trajectory as JSON values; with ``tokens`` every segment's ids, log-probabilities and versions too."""
    row: dict[str, Any] = {
        "episode_id": trajectory.episode_id,
        "group_id": trajectory.group_id,
        "source": trajectory.task.source,
        "task": trajectory.task.index,
        "sample": trajectory.sample,
        "prompt": trajectory.prompt_text,
        "text": trajectory.text,
        "label": trajectory.task.ground_truth,
        "reward": trajectory.reward,
        "rewards": {name: None if reward is None else reward.total for name, reward in trajectory.rewards.items()},
        "score": trajectory.score,
        "finish_reason": trajectory.finish_reason,
        "length": trajectory.action_length,
        "metrics": trajectory.metrics,
    }
    if len(trajectory.actions) > 1:
        row["full_text"] = trajectory.full_text
    if trajectory.unjudged_reason is not None:
        row["unjudged"] = trajectory.unjudged_reason
    if tokens:
        row["segments"] = [
            {"kind": s.kind, "token_ids": s.token_ids, "logprobs": s.logprobs, "versions": s.versions}
            for s in trajectory.segments
        ]
    return row


def dumps(value: Any) -> str:
    """Strict JSON: non-finite numbers become null, what JSON does not know becomes text."""
    return json.dumps(_strict(value), ensure_ascii=False, default=str)


def write_records(path: Path, trajectories: Iterable[Trajectory], *, tokens: bool = False) -> None:
    """Write ``path`` whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("w", encoding="utf-8", errors="backslashreplace") as out:
        for trajectory in trajectories:
            out.write(dumps(record(trajectory, tokens=tokens)) + "\n")
        out.flush()
        os.fsync(out.fileno())
    aside.replace(path)


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
