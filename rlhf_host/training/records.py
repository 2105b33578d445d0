"""Trajectories as JSON lines."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_host.records.episodes import Reward, Trajectory

# JSON allows these raw, but many readers split lines at them.
LONGEST = 8_000
"""Maximum characters of one value of an event."""
_LINE_BREAKS = str.maketrans({0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"})


def record(trajectory: Trajectory, *, tokens: bool = False) -> dict[str, Any]:
    """Returns one trajectory as JSON values, but for its pictures. With ``tokens`` it is complete and can be read back
    (``training.saved_rows``).
    """
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
    more = {
        "full_text": trajectory.full_text if len(trajectory.actions) > 1 else None,
        "images": trajectory.images or None,
        "role": trajectory.role or None,
        "final": None if trajectory.final else False,
        "advantage": trajectory.advantage,
        "unjudged": trajectory.unjudged_reason,
        "events": [_bounded(event) for event in trajectory.events] or None,
    }
    row |= {name: value for name, value in more.items() if value is not None}
    return row | _whole(trajectory) if tokens else row


def _bounded(event: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values, cut to a bounded length: a tool's result may be a whole file."""
    bounded = {}
    for name, value in event.items():
        text = value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)
        bounded[name] = value if len(text) <= LONGEST else f"{text[:LONGEST]} [... {len(text) - LONGEST} characters more]"
    return bounded


def _whole(trajectory: Trajectory) -> dict[str, Any]:
    """Returns the further values that ``saved_rows.read_steps`` needs to restore the trajectory."""
    task = trajectory.task
    several = len(trajectory.completion) > 1
    problem: dict[str, Any] = {"prompt": task.prompt, "metadata": task.metadata, "agent": task.agent}
    if task.prompt_ids is not None and tuple(task.prompt_ids) != tuple(trajectory.prompt_ids):
        problem["prompt_ids"] = task.prompt_ids  # an agent began with a prompt of its own
    row: dict[str, Any] = {
        "row": problem,
        "segments": [
            {"kind": s.kind, "token_ids": s.token_ids, "logprobs": s.logprobs, "versions": s.versions}
            | ({"text": trajectory.decode(s.token_ids)} if several and trajectory.decode else {})
            | ({"images": s.images} if s.images else {})
            for s in trajectory.segments
        ],
        "verdicts": {name: None if reward is None else _verdict(reward) for name, reward in trajectory.rewards.items()},
    }
    if several:
        row["full_text"] = trajectory.full_text
    for name in ("advantages", "trainer_logprobs"):
        if (values := getattr(trajectory, name)) is not None:
            row[name] = [float(f"{value:.5g}") for value in plain(values)]
    if any(reward is not None for reward in trajectory.agent_rewards):
        row["agent_rewards"] = trajectory.agent_rewards
    traces = {name: [own.dtype.str, own.shape, _in_text(own)] for name, own in trajectory.traces.items()}
    row |= {name: own for name, own in (("columns", trajectory.columns), ("traces", traces)) if own}
    if trajectory.row or trajectory.parent is not None:
        row["tree"] = {"row": trajectory.row, "parent": trajectory.parent, "branch": trajectory.branch}
    return row


def _in_text(values: Any) -> str | list[str]:
    return b64encode(values).decode() if values.dtype != object else [b64encode(one).decode() for one in values]


def _verdict(reward: Reward) -> dict[str, Any]:
    names = ("value", "turns", "tokens", "score", "feedback")
    row = {name: value for name in names if (value := getattr(reward, name)) is not None}
    return row | {name: value for name in ("metrics", "parts") if (value := getattr(reward, name))}


def provenance(config: Mapping[str, Any], split: str) -> dict[str, Any]:
    """Returns how a split's trajectories were sampled and their rewards weighted, from a run's configuration as plain values."""
    rollout, drawn = config["rollout"], config["rollout" if split == "train" else "eval"]
    sampling = {name: drawn[name] for name in ("temperature", "top_p", "top_k", "min_p")}
    sampling["max_new_tokens"] = drawn["max_new_tokens"] or rollout["max_new_tokens"]
    rewards = (split == "eval" and config["eval"]["reward"]) or config["reward"]
    return {"sampling": sampling, "weights": {alias: choice["weight"] for alias, choice in rewards.items()}}


def json_line(row: Mapping[str, Any], unknown: Callable[[Any], Any] = str) -> bytes:
    """Returns the row as a line. ``unknown`` is as in ``plain``."""
    text = json.dumps(plain(row, unknown), ensure_ascii=False, allow_nan=False).translate(_LINE_BREAKS)
    # A lone surrogate has no UTF-8; its backslash form is its JSON escape as well.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def plain(value: Any, unknown: Callable[[Any], Any] = str) -> Any:
    """Converts the value to strict JSON: non-finite numbers become ``None``.

    Args:
        unknown: converts objects that JSON does not have.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item, unknown) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, unknown) for item in value]
    if hasattr(value, "tolist"):  # tensors and arrays
        return plain(value.tolist(), unknown)
    return unknown(value)
