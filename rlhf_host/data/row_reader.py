"""Rows as tasks: which columns have prompt, label and agent, and what is wrong with a row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_host.config.schema import DataConfig, DataSource
from rlhf_host.data.rows import Rows
from rlhf_host.errors import UserError, near_matches
from rlhf_host.records.episodes import Task

PROMPT_KEYS = ("prompt", "question", "problem", "messages", "instruction", "input")
LABEL_KEYS = ("label", "answer", "ground_truth", "solution", "target", "output", "reward_model.ground_truth")
OFFLINE: dict[tuple[str, ...], str] = {
    ("chosen", "rejected"): "preference",
    ("completions", "labels"): "stepwise",
    ("completion", "label"): "unpaired",
}
"""Columns of data that has answers already → its format."""
LONGEST_TEXT = 1_000_000
"""Characters of a message: a tokenizer takes seconds and hundreds of megabytes for as many."""


class RowReader:
    """Rows as tasks; which columns matter is settled at the first row that has them."""

    def __init__(self, data: DataConfig, source: DataSource, name: str, rows: Rows):
        self.rows, self.name = rows, name
        self.prompt_key = source.prompt_key or data.prompt_key
        self.label_key = source.label_key or data.label_key
        self.agent_key = data.agent_key
        self.context_key: str | None = None
        """The column with more of the prompt, such as Alpaca's ``input``."""
        self.bad = BadRows(rows.where, stops=data.on_bad_row == "stop")

    @property
    def skipped(self) -> str:
        """What was left out, for the report."""
        return (
            f"; left out {len(self.bad)} bad row{'s' * (len(self.bad) != 1)}, the first at {self.bad.first}"
            if len(self.bad)
            else ""
        )

    @property
    def columns(self) -> str:
        """Which columns were read, once the first row is."""
        return f"prompt {self.prompt_key!r}, " + (f"label {self.label_key!r}" if self.label_key else "no label")

    def read(self, limit: int | None) -> list[Task]:
        """The first ``limit`` tasks."""
        tasks: list[Task] = []
        settled = False
        for index, row in enumerate(self.rows.rows):
            try:
                if not settled:
                    self._settle(row)
                    settled = True
                if self.label_key is None:
                    self._settle_label(row, index, tasks)
                tasks.append(self._task(row, index))
            except Malformed as fault:
                self.bad.add(index, fault)
            if len(tasks) == limit:
                break
        return tasks

    def _settle(self, row: Mapping[str, Any]) -> None:
        if self.prompt_key is None:
            self._refuse_offline(row)
            self.prompt_key = next((key for key in PROMPT_KEYS if key in row), None)
            if self.prompt_key is None:
                columns, keys = ", ".join(row) or "none", ", ".join(PROMPT_KEYS)
                raise Malformed(f"no column for the prompt: none of {keys} is among {columns}; set data.prompt_key")
            if self.prompt_key == "instruction":
                self.context_key = "input"

    def _settle_label(self, row: Mapping[str, Any], index: int, before: list[Task]) -> None:
        """The first row with a known label column settles it, and the tasks read before it are bad rows."""
        known = (key for key in LABEL_KEYS if look_up(row, key) is not MISSING)
        self.label_key = next((key for key in known if key not in (self.prompt_key, self.context_key)), None)
        if self.label_key is not None:
            for task in before:
                self.bad.add(task.index, Malformed(f"no {self.label_key!r} (the label), which {self.rows.where(index)} has"))
            before.clear()

    def _refuse_offline(self, row: Mapping[str, Any]) -> None:
        nothing: tuple[tuple[str, ...], str] = ((), "")
        columns, kind = next((item for item in OFFLINE.items() if row.keys() >= set(item[0])), nothing)
        if kind == "unpaired" and not isinstance(row["label"], bool):
            kind = ""
        if not kind and "completion" in row and not any(look_up(row, key) is not MISSING for key in LABEL_KEYS):
            columns, kind = ("completion",), "prompt-completion"
        if kind:
            raise Malformed(
                f"with {' and '.join(columns)} this is {kind} data, which algorithms that sample do not train on; to use its"
                " prompts alone, set data.prompt_key",
                whole=True,
            )

    def _task(self, row: Mapping[str, Any], index: int) -> Task:
        assert self.prompt_key is not None
        prompt = get(row, self.prompt_key, "prompt")
        check_prompt(prompt, self.prompt_key)
        if self.context_key is not None and (context := row.get(self.context_key)):
            prompt = f"{prompt}\n\n{context}"
        label = agent = None
        if self.label_key is not None:
            label = get(row, self.label_key, "label")
            if label is None or label == "":
                advice = "every row needs a label, or set data.label_key to another column"
                raise Malformed(f"{self.label_key!r} is empty; {advice}")
        if self.agent_key is not None:
            agent = get(row, self.agent_key, "agent")
            if agent is not None and not isinstance(agent, str):
                raise Malformed(f"{self.agent_key!r} must be an agent's name, not {type(agent).__name__}")
        used = {self.prompt_key, self.context_key, self.label_key, self.agent_key}
        metadata = {key: value for key, value in row.items() if key not in used}
        return Task(clean_messages(prompt), label, metadata, agent or None, index, self.name)


class Malformed(Exception):
    """What is wrong with a row, or with the ``whole`` source; the place is added where it is known."""

    def __init__(self, problem: str, whole: bool = False):
        super().__init__(problem)
        self.whole = whole


@dataclass(slots=True)
class BadRows:
    """The rows that were left out, or the error that the first of them is."""

    where: Callable[[int], str]
    stops: bool
    first: str = ""
    first_index: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return self.reasons.total()

    def add(self, index: int, fault: Malformed) -> None:
        """Count a row. Raises ``UserError`` with its place where bad rows stop, or where the whole source is at fault."""
        place = f"{self.where(index)}: {fault}"
        if self.stops or fault.whole:
            raise UserError(place if fault.whole else f"{place} (data.on_bad_row skip leaves such rows out)") from None
        if not self.first or index < self.first_index:  # rows may be found out of order
            self.first, self.first_index = place, index
        self.reasons[re.sub(r"[\d,]*\d", "N", str(fault))] += 1


MISSING = object()


def look_up(row: Mapping[str, Any], key: str) -> Any:
    """The column, or what dots lead to inside one: ``reward_model.ground_truth``. ``MISSING``: there is none."""
    if key in row:
        return row[key]
    head, dot, rest = key.partition(".")
    inner = row.get(head) if dot else None
    return look_up(inner, rest) if isinstance(inner, Mapping) else MISSING


def get(row: Mapping[str, Any], key: str, meaning: str) -> Any:
    if (value := look_up(row, key)) is MISSING:
        columns = f"; the row has {','.join(row)}" if row else "; the row is empty"
        raise Malformed(f"no {key!r} (the {meaning}){near_matches(key, row) or columns}")
    return value


def check_prompt(prompt: Any, key: str) -> None:
    if prompt is None:
        raise Malformed(f"{key!r} is null; give the row a prompt or take it out")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise Malformed(f"{key!r} is empty; give the row a prompt or take it out")
        check_text(prompt, key)
        return
    if not isinstance(prompt, list):
        raise Malformed(f"{key!r} must be a text or a list of messages, not {type(prompt).__name__}")
    if not prompt:
        raise Malformed(f"{key!r} has no messages")
    for number, message in enumerate(prompt, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise Malformed(f'{key!r}: message {number} must be {{"role": ..., "content": ...}}')
        if not isinstance(message.get("content"), str):
            raise Malformed(f"{key!r}: the content of message {number} ({message['role']}) must be a text")
        check_text(message["content"], key)
    if prompt[-1]["role"] == "assistant":
        raise Malformed(f"{key!r} ends with an assistant's message; end it with what the model is to answer")
    if not prompt[-1]["content"].strip():
        raise Malformed(f"{key!r} ends with an empty message")


def check_text(text: str, key: str) -> None:
    if len(text) > LONGEST_TEXT:
        raise Malformed(f"{key!r} has {len(text):,} characters, more than {LONGEST_TEXT:,}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Malformed(f"{key!r} has half a character, {text[error.start]!a}: no tokenizer can read it") from None


def clean_messages(prompt: Any) -> Any:
    """Messages without the null fields that columnar formats add."""
    if isinstance(prompt, str):
        return prompt
    return [{key: value for key, value in message.items() if value is not None} for message in prompt]
