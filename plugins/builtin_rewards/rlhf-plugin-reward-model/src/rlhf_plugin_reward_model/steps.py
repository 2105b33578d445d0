"""Steps of an answer: where they end in its tokens, what a model reads of them, and how their scores become a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from rlhf_host import Trajectory, Unjudged, UserError

Aggregate = Literal["min", "last", "mean", "product", "sum"]


@dataclass(frozen=True, slots=True)
class Step:
    """A step, and the action token that ends it, counted over all action tokens."""

    text: str
    token: int


@dataclass(frozen=True, slots=True)
class Reading:
    """Tokens that a model reads of an answer, and the places among them whose scores are those of the steps."""

    ids: list[int]
    places: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Form in which a model reads steps: ``tag`` stands after each, and ``join`` between a tag and the next step."""

    template: Literal["same_tokens", "pieces", "text", "chat"]
    tag: str
    join: str = ""


def steps_of(row: Trajectory, separator: str) -> list[Step]:
    """Returns the parts of each turn's text between separators, without blank ones."""
    steps, before = [], 0
    for segment in row.actions:
        ids = list(segment.token_ids)
        parts = decoded(row, ids).split(separator)
        start = length = 0
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            length += len(part) + (0 if last else len(separator))
            if not part.strip():
                continue
            if last:
                end = len(ids) - 1
            else:
                end, read = _end(row, ids, start, length)
                start, length = end + 1, length - read
            steps.append(Step(part, before + end))
        before += len(ids)
    return steps


def decoded(row: Trajectory, ids: Sequence[int]) -> str:
    """Returns the text of tokens. Raises ``ValueError`` outside a run."""
    if row.decode is None:
        raise ValueError(f"trajectory {row.episode_id} has no decoder: text is available inside a run")
    return row.decode(ids)


def _end(row: Trajectory, ids: Sequence[int], start: int, length: int) -> tuple[int, int]:
    """Returns the first token with which the text from ``start`` on has ``length`` characters, and how many it then has.

    Decodes no more than a step, in doubling pieces: answers have thousands of steps.
    """
    first = max(0, start - 1)  # some tokenizers leave out the space before a text's first token
    before = len(decoded(row, ids[first:start]))

    def characters(end: int) -> int:
        return len(decoded(row, ids[first : end + 1])) - before

    size = 1
    while start + size < len(ids) and characters(start + size - 1) < length:
        size *= 2
    low, high = start + size // 2, min(start + size, len(ids)) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if characters(middle) >= length else (middle + 1, high)
    return high, characters(high)


def tag_token(tokenizer: Any, tag: str) -> int:
    """Returns the token of a tag behind other text. Raises ``UserError`` if it is not exactly one."""
    alone, tagged = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a", "a" + tag))
    if tagged[: len(alone)] != alone or len(tagged) != len(alone) + 1:
        said = len(tagged) - len(alone) if tagged[: len(alone)] == alone else "no"
        raise UserError(
            f"with this template the tag must be one token of the model that judges, and {tag!r} is {said}: set tag to the token"
            " that it was trained with, or template to same_tokens or pieces"
        )
    return int(tagged[-1])


def read(row: Trajectory, steps: Sequence[Step], form: Form, tokenizer: Any) -> Reading | Unjudged:
    """Returns what the model reads. ``Unjudged`` if the text has tags beside those of the steps."""
    if form.template in ("same_tokens", "pieces"):
        ids = list(row.prompt_ids) if form.template == "same_tokens" else _prompt(row.prompt_text, tokenizer)
        own, tag = (
            tokenizer(texts, add_special_tokens=False)["input_ids"] for texts in ([step.text for step in steps], form.tag)
        )
        places = []
        for step in own:
            ids += [*step, *tag]
            places.append(len(ids) - 1)
        return Reading(ids, places)
    answer = form.join.join(step.text + form.tag for step in steps)
    if form.template == "chat":
        text, special = tokenizer.apply_chat_template(_messages(row, answer), tokenize=False), False
    else:
        text, special = row.prompt_text + answer, True
    ids, token = list(tokenizer(text, add_special_tokens=special)["input_ids"]), tag_token(tokenizer, form.tag)
    places = [place for place, each in enumerate(ids) if each == token]
    if len(places) != len(steps):
        return Unjudged(f"{len(places)} tags for {len(steps)} steps: the answer or its prompt has the tag itself")
    return Reading(ids, places)


def _prompt(text: str, tokenizer: Any) -> list[int]:
    """Returns a prompt's tokens without the end that the tokenizer adds."""
    ids = list(tokenizer(text)["input_ids"])
    ended = ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token)
    return ids[:-1] if ended else ids


def _messages(row: Trajectory, answer: str) -> list[Mapping[str, Any]]:
    prompt = row.task.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [*messages, {"role": "assistant", "content": answer}]


def parts_of(values: Sequence[float], aggregate: Aggregate) -> list[float]:
    """Returns each step's part of the reward; their sum is the aggregate of all steps. A part of ``min``, ``last`` and
    ``product`` is the change that the step makes to the aggregate of the steps so far.
    """
    if aggregate == "sum":
        return list(values)
    if aggregate == "mean":
        return [value / len(values) for value in values]
    so_far = {
        "min": lambda: accumulate(values, min),
        "last": lambda: iter(values),
        "product": lambda: accumulate(values, lambda left, right: left * right),
    }[aggregate]()
    parts, before = [], 0.0
    for value in so_far:
        parts.append(value - before)
        before = value
    return parts
