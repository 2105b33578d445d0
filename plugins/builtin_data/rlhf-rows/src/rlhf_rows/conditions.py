"""Prompts that tell the reward of the answer, so that a model learns to answer as well as it is asked to."""

from __future__ import annotations

from string import Formatter
from typing import Any

from rlhf_host import UserError
from rlhf_host.internals import Malformed

FIELDS = {"prompt", "reward"}


def check_condition(condition: str | None) -> None:
    """Raises ``UserError`` unless it is a format with the fields ``prompt`` and ``reward``, or None."""
    if condition is None:
        return
    example = "such as '{prompt} <rm_score>: {reward:.2f} '"
    try:
        named = {name for _, name, _, _ in Formatter().parse(condition) if name is not None}
        if named != FIELDS:
            raise UserError(
                f"data.condition {condition!r} needs the fields {{prompt}} and {{reward}}, and no others: {example}"
            )
        condition.format(prompt="", reward=0.5)
    except ValueError as error:
        raise UserError(f"data.condition {condition!r} is no format: {error}; {example}") from error


def conditioned(prompt: Any, condition: str, reward: float) -> Any:
    """Returns the prompt, or the last message of a conversation, in the format. Raises ``Malformed`` if that is not a text."""
    if isinstance(prompt, str):
        return condition.format(prompt=prompt, reward=reward)
    *before, last = prompt
    if not isinstance(last.get("content"), str):
        raise Malformed("data.condition needs a text as the content of the prompt's last message")
    return [*before, {**last, "content": condition.format(prompt=last["content"], reward=reward)}]
