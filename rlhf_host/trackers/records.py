"""Metrics and trajectories as plain values for any output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_host.data.processor import around_pictures
from rlhf_host.errors import UserError
from rlhf_host.records.episodes import Segment, Trajectory
from rlhf_host.training.records import plain


def number(value: Any) -> float | None:
    """Returns a metric as a float, NaN and infinities included; None if it is not a single number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics that are a single number each."""
    return {name: value for name, metric in metrics.items() if (value := number(metric)) is not None}


def readable(value: Any) -> Any:
    """Converts settings, a table's cell or a text to strict JSON, as ``plain`` does, with half a character (a lone surrogate), for
    which no UTF-8 exists, as its escape.
    """
    match plain(value):
        case str(text):
            return text.encode("utf-8", "backslashreplace").decode()
        case dict(items):
            return {readable(name): readable(item) for name, item in items.items()}
        case list(items):
            return [readable(item) for item in items]
        case other:
            return other


def shorten(text: str, width: int) -> str:
    """Returns at most ``width`` characters, with the middle left out, because answers are at the end."""
    if len(text) <= width:
        return text
    head = (width - 5) // 2
    return f"{text[:head]} ... {text[-(width - 5 - head) :]}"


def prompt_text(trajectory: Trajectory) -> str:
    """Returns the prompt as the policy saw it, or the task's own if nothing can decode it."""
    if trajectory.decode is not None:
        return trajectory.prompt_text
    prompt = trajectory.task.prompt
    return prompt if isinstance(prompt, str) else "\n".join(str(message.get("content", "")) for message in prompt)


def sample_texts(trajectory: Trajectory, tokenizer: Any = None) -> tuple[str, str, str]:
    """Returns the prompt; the text after it, observations included, empty if nothing can decode it; and the label, empty
    without one. With a tokenizer the texts are what the model saw and wrote, special tokens included.
    """
    label = f"{trajectory.columns['label']:g}" if "label" in trajectory.columns else trajectory.task.ground_truth
    prompt, completion = prompt_text(trajectory), ""
    if tokenizer is not None:
        completed = trajectory.completion
        begun = trajectory.segments[: len(trajectory.segments) - len(completed)]
        prompt, completion = (_seen(tokenizer, segments) for segments in (begun, completed))
    elif trajectory.decode is not None:
        completion = trajectory.text if len(trajectory.completion) == 1 else trajectory.full_text
    return prompt, completion, "" if label is None else str(plain(label))


def _seen(tokenizer: Any, segments: Sequence[Segment]) -> str:
    """Returns all tokens as text, with ``[picture 56×42]`` for those of each picture, if their places are known."""
    parts: list[list[int]] = [[]]
    marks: list[str] = []
    for segment in segments:
        sizes = [(picture.width, picture.height) for picture in segment.images]
        try:
            first, *others = around_pictures(tokenizer, segment.token_ids, sizes) if sizes else [segment.token_ids]
        except UserError:
            first, others, sizes = segment.token_ids, [], []
        parts[-1] += first
        parts += map(list, others)
        marks += (f"[picture {width}×{height}]" for width, height in sizes)
    first_text, *texts = (tokenizer.decode(ids, skip_special_tokens=False) for ids in parts)
    return str(first_text) + "".join(mark + text for mark, text in zip(marks, texts, strict=True))


def reward_cell(trajectory: Trajectory) -> str:
    """Returns the reward for a table; empty for a row of a data set."""
    value = number(trajectory.reward)
    if value is None and not trajectory.sampled:
        return ""
    return "unjudged" if value is None else f"{value:.3g}"


def setting(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """Returns ``config["trajectories"][key]``, or the default if a caller's configuration has no such section."""
    return (config.get("trajectories") or {}).get(key, default)


def has_samples(split: str, step: int, every: int) -> bool:
    """Returns True if a step shows sample trajectories. The first steps are most useful: they show if prompt, stop and reward
    are as intended.
    """
    return split != "train" or step <= 1 or step % every == 0


def spread(trajectories: Sequence[Trajectory], count: int, *, first: bool = False) -> list[Trajectory]:
    """Returns ``count`` of them in their order. If they are two or more, one has the highest reward there is, and one the lowest.

    Args:
        first: the first ones; groups with such a reward take the place of the last. Default: evenly spaced, so that they come from
            several groups.
    """
    count = min(count, len(trajectories))
    places = dict.fromkeys(place if first else place * len(trajectories) // count for place in range(count))
    rewards = [math.nan if (value := number(row.reward)) is None else value for row in trajectories]
    judged = [place for place, value in enumerate(rewards) if math.isfinite(value)] if count > 1 else []
    ends = [min(judged, key=lambda place: (sign * rewards[place], place not in places)) for sign in (1, -1) if judged]
    ids = {trajectories[place].group_id for place in ends if first and place not in places}
    mates = [place for place, row in enumerate(trajectories) if row.group_id in ids]
    return [trajectories[place] for place in sorted([*dict.fromkeys([*ends, *mates, *places])][:count])]


def sample_rows(
    step: int, split: str, trajectories: Sequence[Trajectory], *, every: int, rows: int, tokenizer: Any = None
) -> list[dict[str, Any]]:
    """Returns rows for a table of samples, all with the same columns; none at a step without samples.

    Texts have UTF-8, and a number is None where there is none.

    Args:
        step: of ``log_trajectories``, as are ``split`` and ``trajectories``.
        every: steps between tables of ``train``. The first steps and all evaluations have one.
        rows: maximum number, evenly spaced among the trajectories.
        tokenizer: of the run (``RunContext.tokenizer``); with it, texts have their special tokens.
    """
    if not has_samples(split, step, every):
        return []
    return [_sample_row(step, trajectory, tokenizer) for trajectory in spread(trajectories, rows)]


def _sample_row(step: int, trajectory: Trajectory, tokenizer: Any) -> dict[str, Any]:
    prompt, completion, label = map(readable, sample_texts(trajectory, tokenizer))
    return {
        "step": step,
        "prompt": prompt,
        "completion": completion,
        "label": label,
        "reward": number(trajectory.reward),
        "score": number(trajectory.score),
        "advantage": number(trajectory.advantage),
        "finish_reason": trajectory.finish_reason,
        "length": trajectory.action_length,
    }
