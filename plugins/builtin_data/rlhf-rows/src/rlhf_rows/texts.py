"""What a row of a data set was read from, kept beside its tokens for plugins that need its text or further columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlhf_host import Task

if TYPE_CHECKING:
    from rlhf_rows.examples import Example

ROW = "rlhf_rows"
"""Key of ``Task.metadata`` with what is known of the row beside its columns."""


def kept_text(example: Example, row: Mapping[str, Any], where: str, part: int, parts: int) -> str:
    """Returns JSON of a row that became ``parts`` units, of which this is number ``part``: the example, and all columns with
    texts, numbers, true or false.
    """
    beside = example.beside
    about = {"where": where, "part": part, "parts": parts, "system": beside.system, "own_turns": example.own_turns}
    kept = {
        "prompt": example.prompt,
        "completions": list(example.completions),
        "columns": {name: value for name, value in row.items() if isinstance(value, str | int | float | bool)},
        "tools": beside.tools,
        "template_kwargs": dict(beside.template_kwargs),
        "about": about | {"tokens": bool(example.tokens)},
    }
    return json.dumps(kept, default=str, ensure_ascii=False)


def task_of(text: str, index: int, source: str, prompt_ids: tuple[int, ...]) -> Task:
    """Returns a unit's task: its prompt and, as ``ground_truth``, its answer, or its answers if it has several; without ``text``
    only its tokens.
    """
    if not text:
        return Task("", index=index, source=source, prompt_ids=prompt_ids)
    kept = json.loads(text)
    answers = kept["completions"]
    return Task(
        kept["prompt"],
        answers[0] if len(answers) == 1 else answers,
        {**kept["columns"], ROW: kept["about"]},
        index=index,
        source=source,
        prompt_ids=prompt_ids,
        tools=kept["tools"],
        template_kwargs=kept["template_kwargs"],
    )


def where_of(task: Task) -> str:
    """Returns the place of a task's row, for messages."""
    about = task.metadata.get(ROW)
    return str(about["where"]) if about else f"{task.source}, task {task.index + 1}"
