"""Rows read as training reads them, as texts in which what is trained is marked."""

import json

import pytest
from rlhf_rows.load_units import load_units

from rlhf_host.config.schema import DataConfig
from rlhf_host.data.sources import load_tasks
from rlhf_host.errors import UserError

from .conftest import CHATML, byte_tokenizer

THINKS = CHATML.replace(
    "message['content'] +",
    "('<think>' + message['reasoning_content'] + '</think>' if message['reasoning_content'] else '') + message['content'] +",
)
NARROW = CHATML.replace("in messages %}", "in messages if message['role'] in ('user', 'assistant') %}")
OPENS = "<|im_start|>assistant\n"


def user(text, **more):
    return {"role": "user", "content": text, **more}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def turn(role, text):
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


HELPFUL = turn("system", "You are helpful.")


def shown(row, tokenizer):
    """A row as text, its trained tokens in ⟦⟧."""
    text, place, ids = tokenizer.decode(list(row.prompt_ids)), 0, list(row.completion_ids)
    for begin, end in row.trained:
        text += f"{tokenizer.decode(ids[place:begin])}⟦{tokenizer.decode(ids[begin:end])}⟧"
        place = end
    return text + tokenizer.decode(ids[place:])


def read(rows, kind="prompt_completion", template=CHATML, template_of=None, **settings):
    """What is trained of rows, or of a file: a text for each row, or for both of a pair."""
    tokenizer = byte_tokenizer(template)
    path, given = ("python:data", {"python:data": rows}) if not isinstance(rows, str) else (rows, {})
    data = DataConfig(sources=[{"path": path}], template=template_of, **settings)
    units = load_units(data, kind=kind, split="train", tokenizer=tokenizer, rows=given)
    (source,) = units.sources.values()
    return [shown(row, tokenizer) for unit in source for row in unit.rows]


def asked(rows, template=CHATML, template_of=None, **settings):
    """The prompts of a run that samples."""
    tokenizer = byte_tokenizer(template)
    path, given = ("python:data", {"python:data": rows}) if not isinstance(rows, str) else (rows, {})
    data = DataConfig(sources=[{"path": path}], template=template_of, **settings)
    tasks = load_tasks(data, split="train", tokenizer=tokenizer, seed=0, rows=given)
    return [tokenizer.decode(list(task.prompt_ids)) for task in tasks.tasks]


def refused(call, *arguments, **settings):
    with pytest.raises(UserError) as caught:
        call(*arguments, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)
