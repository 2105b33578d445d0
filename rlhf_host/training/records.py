"""Trajectories as JSON lines, written aside and renamed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf_host.types import Trajectory

# JSON allows these raw, but many readers split lines at them.
_LINE_BREAKS = str.maketrans({0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"})


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


def write_records(path: Path, trajectories: Iterable[Trajectory], *, tokens: bool = False) -> None:
    """Trajectories as JSON lines, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, b"".join(json_line(record(trajectory, tokens=tokens)) for trajectory in trajectories))


def json_line(row: Mapping[str, Any]) -> bytes:
    text = json.dumps(plain(row), ensure_ascii=False, allow_nan=False).translate(_LINE_BREAKS)
    # A lone surrogate has no UTF-8; its backslash form is its JSON escape as well.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def write_whole(path: Path, content: bytes) -> None:
    """Write aside, sync, rename: readers see the old file or the new one."""
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def plain(value: Any) -> Any:
    """The value in what strict JSON knows: non-finite numbers become ``None``, unknown objects their ``str``."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # tensors and arrays
        return plain(value.tolist())
    return str(value)
