"""Rows as tasks: finds the columns with prompt, label and agent, and the problems of a row."""

from __future__ import annotations

import math
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_host.config.schema import DataConfig, DataSource
from rlhf_host.data.bad_rows import MISSING, BadRows, Malformed, check_text, get, kind_of, look_up
from rlhf_host.data.contents import has_pictures
from rlhf_host.data.messages import as_list, messages_of
from rlhf_host.data.pictures import ROWS, Origin, looks_like_a_picture, pictured
from rlhf_host.data.row_context import BESIDE, HISTORY, PICTURES, context_of, with_system
from rlhf_host.data.row_values import listed, text_of, turns_of
from rlhf_host.data.rows import Rows
from rlhf_host.records.episodes import Message, Task
from rlhf_host.records.pictures import is_list, pictures_in

PROMPT_KEYS = ("prompt", "question", "problem", "messages", "instruction", "input")
LABEL_KEYS = ("label", "answer", "ground_truth", "solution", "target", "output", "reward_model.ground_truth")
CHOICES = {"choices", "options", "endings", "candidates", "alternatives"}
"""Columns of answers to choose from."""
OFFLINE: dict[tuple[str, ...], str] = {
    ("chosen", "rejected"): "preference",
    ("completions", "labels"): "stepwise",
    ("completion", "label"): "unpaired",
}
"""Columns of data that has answers already → its format."""


class RowReader:
    """Reads rows as tasks. The columns to read are chosen at the first row that has them."""

    def __init__(self, data: DataConfig, source: DataSource, name: str, rows: Rows):
        self.rows, self.name = rows, name
        self.prompt_key = source.prompt_key or data.prompt_key
        self.label_key = source.label_key or data.label_key
        self.agent_key = data.agent_key
        self.context_key: str | None = None
        """Column with more of the prompt, such as Alpaca's ``input``."""
        self.ignore = data.ignore
        self.origin = Origin(rows.root, kept=True, fetch=data.fetch_images)
        self.unread: str | None = None
        """A column that may have pictures and is not read."""
        self.bad = BadRows(rows.where, stops=data.on_bad_row == "stop")

    @property
    def columns(self) -> str:
        """Columns that were read, once the first row is."""
        return f"prompt {self.prompt_key!r}, " + (f"label {self.label_key!r}" if self.label_key else "no label")

    def columns_of(self, task: Task) -> str:
        """Returns all columns of a task's row."""
        used = (self.prompt_key, self.context_key, self.label_key, self.agent_key)
        return ", ".join([*filter(None, used), *task.metadata])

    def read(self, limit: int | None) -> list[Task]:
        """Returns the first ``limit`` tasks."""
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
        """Chooses the label column at the first row that has a known one. Tasks read before it become bad rows."""
        known = (key for key in LABEL_KEYS if look_up(row, key) is not MISSING)
        self.label_key = next((key for key in known if key not in (self.prompt_key, self.context_key)), None)
        if self.label_key is not None:
            for task in before:
                self.bad.add(task.index, Malformed(f"no {self.label_key!r} (the label), which {self.rows.where(index)} has"))
            before.clear()

    def _refuse_offline(self, row: Mapping[str, Any]) -> None:
        nothing: tuple[tuple[str, ...], str] = ((), "")
        columns, kind = next((item for item in OFFLINE.items() if row.keys() >= set(item[0])), nothing)
        if kind == "unpaired" and str(row["label"]).lower() not in ("true", "false"):
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
        prompt: str | list[Message] = prompt_of(get(row, self.prompt_key, "prompt"), self.prompt_key, self.ignore)
        if self.context_key is not None and (context := row.get(self.context_key)):
            if not isinstance(prompt, str):
                raise Malformed(f"{self.context_key!r} cannot be put below a list of messages: leave it out of the row")
            prompt = f"{prompt}\n\n{text_of(context, self.context_key)}"
        label = agent = None
        if self.label_key is not None:
            label = get(row, self.label_key, "label")
            missing = isinstance(label, float) and math.isnan(label)  # as data frames have it
            if label is None or label == "" or missing:
                advice = "every row needs a label, or set data.label_key to another column"
                raise Malformed(f"{self.label_key!r} is empty; {advice}")
        if self.agent_key is not None:
            agent = get(row, self.agent_key, "agent")
            if agent is not None and not isinstance(agent, str):
                raise Malformed(f"{self.agent_key!r} must be an agent's name, not {type(agent).__name__}")
        used = {self.prompt_key, self.context_key, self.label_key, self.agent_key}
        for key in CHOICES & row.keys() - used - {*self.ignore}:
            if _must_be_read(row[key], label, prompt):
                raise Malformed(
                    f"{self.label_key!r} chooses from {key!r}, and nothing reads that: write the choices into the prompt, or, where"
                    f" an agent does, leave them unread (data.ignore {key})"
                )
        if index == 0 and not any(row.get(name) for name in PICTURES):
            others = (key for key in row if key not in used and key not in PICTURES)
            self.unread = next((key for key in others if looks_like_a_picture(row[key])), None)
        metadata = {
            key: value for key, value in row.items() if key not in used and not (key in PICTURES and key in self.ignore)
        }
        task = Task(prompt, label, metadata, agent or None, index, self.name)
        if not BESIDE.isdisjoint(metadata):
            task = with_context(task, self.ignore, history=self.context_key is not None, origin=self.origin)
        return seen(task, self.origin)


def _must_be_read(choices: Any, label: Any, prompt: str | Sequence[Message]) -> bool:
    """Returns True if a label is the number or the letter of one of these choices (a list of texts, or a mapping with one), and the
    prompt does not have them.
    """
    choices = listed(choices)
    texts = choices.get("text", [*choices.values()]) if isinstance(choices, Mapping) else choices
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts) or (said := str(label)) in texts:
        return False
    chosen = (said.isdecimal() and int(said) <= len(texts)) or said in string.ascii_uppercase[: len(texts)]
    asked = prompt if isinstance(prompt, str) else "\n".join(str(message.get("content")) for message in prompt)
    return chosen and not all(text.strip() in asked for text in texts)


def with_context(task: Task, ignore: Collection[str] = (), *, history: bool = False, origin: Origin = ROWS) -> Task:
    """Returns the task with the values of its metadata that belong to the prompt. Raises ``Malformed`` for values that cannot
    be honoured.

    Args:
        history: True if earlier turns in Alpaca's form are read.
        origin: of the row's pictures.
    """
    beside = context_of(task.metadata, {*ignore, HISTORY} if history else ignore)
    prompt = task.prompt
    turns = turns_of(task.metadata.get(HISTORY)) if history and HISTORY not in ignore else []
    if beside.system is not None or turns:
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        earlier = [({"role": "user", "content": asked}, {"role": "assistant", "content": said}) for asked, said in turns]
        prompt = with_system([*(message for turn in earlier for message in turn), *messages], beside.system)
    metadata = task.metadata
    if beside.images:
        prompt = pictured(prompt, beside.images, origin)
        metadata = {name: value for name, value in metadata.items() if name not in PICTURES}
    return replace(task, prompt=prompt, metadata=metadata, tools=beside.tools, template_kwargs=beside.template_kwargs)


def seen(task: Task, origin: Origin = ROWS) -> Task:
    """Returns the task with the pictures of its prompt's parts. Raises ``Malformed`` for pictures that cannot be used."""
    prompt = task.prompt
    if not task.images and (isinstance(prompt, str) or not any(has_pictures(message.get("content")) for message in prompt)):
        return task
    messages = pictured(prompt, task.images, origin)
    return replace(task, prompt=messages, images=pictures_in(messages))


def prompt_of(prompt: Any, key: str, ignore: Collection[str] = ()) -> str | list[Message]:
    """Returns a text, or messages of any roles that end with the one to answer. Raises ``Malformed`` for anything else."""
    prompt = as_list(prompt)
    if prompt is None:
        raise Malformed(f"{key!r} is null; give the row a prompt or take it out")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise Malformed(f"{key!r} is empty; give the row a prompt or take it out")
        check_text(prompt, key)
        return prompt
    if not isinstance(prompt, list):
        raise Malformed(f"{key!r} must be a text or a list of messages, not {kind_of(prompt)}")
    messages = messages_of(prompt, key, ignore, roles=None)
    if messages[-1]["role"] == "assistant":
        raise Malformed(f"{key!r} ends with an assistant's message; end it with what the model is to answer")
    if not is_list(content := messages[-1]["content"]) and not content.strip():
        raise Malformed(f"{key!r} ends with an empty message")
    return messages
