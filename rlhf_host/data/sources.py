"""From data settings to tasks: files, directories, hub names and task plugins, checked, rendered and bounded in length."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rlhf_host.config.schema import DataConfig, DataSource
from rlhf_host.data.chat import check_template, render_prompts
from rlhf_host.data.rows import COMPRESSED, SUFFIXES, Rows, looks_like_a_file, read_hub, read_path
from rlhf_host.data.stream import TaskSet, TaskStream
from rlhf_host.errors import PluginError, UserError, near_matches
from rlhf_host.plugins.selection import is_given
from rlhf_host.records.episodes import Task

__all__ = ["TaskSet", "TaskStream", "load_tasks"]

Split = Literal["train", "eval"]

PROMPT_KEYS = ("prompt", "question", "problem", "messages", "input")
LABEL_KEYS = ("label", "answer", "ground_truth", "solution", "target", "output")
SPLITS: dict[str, tuple[str, ...]] = {"train": ("train",), "eval": ("test", "validation", "eval", "dev")}
"""Which split of a directory or hub dataset is read when none is named: the first of these it has."""


GivenRows: TypeAlias = Mapping[str, Iterable[Mapping[str, Any]]]
"""A source's path, ``python:NAME`` → its rows."""

NO_ROWS: GivenRows = {}


def load_tasks(
    data: DataConfig,
    *,
    split: Split,
    tokenizer: Any,
    seed: int,
    max_prompt_tokens: int | None = None,
    given: GivenRows = NO_ROWS,
) -> TaskSet:
    """The tasks of all sources, in file order, with prompts rendered and tokenised.

    Each source's ``path`` is a file or directory if there is one, else the name of a task plugin, else a hub dataset; or it is
    among ``given``.
    ``max_samples`` of a source takes its first rows; that of ``data`` is shared over the sources by weight, the first rows of
    each. Prompts longer than ``data.max_prompt_tokens`` or ``max_prompt_tokens`` (the model's own limit), whichever is
    smaller, are left out or cut as ``data.long_prompts`` says, and counted in the report.

    Raises ``UserError`` for data that cannot be found or read, naming file and line of the first malformed row.
    """
    if not data.sources:
        raise UserError("no data: give --data a file, a directory, a hub name or a task plugin's name")
    check_template(data.template)
    report: list[str] = []
    read: dict[str, list[Task]] = {}
    for name, source in _named(data.sources):
        limit = min((limit for limit in (source.max_samples, data.max_samples) if limit is not None), default=None)
        tasks, said = _read_source(data, source, name, split, seed, limit, given)
        if not tasks:
            raise UserError(f"{source.path} has no rows")
        read[name] = tasks
        report.append(said)
    weights = {name: source.weight for name, source in _named(data.sources)}
    if data.max_samples is not None:
        read = _share(read, weights, data.max_samples)
    limits = [limit for limit in (data.max_prompt_tokens, max_prompt_tokens) if limit is not None]
    tasks = []
    for name, found in read.items():
        rendered = _tokenise(found, data, tokenizer)
        kept, said = _bound(rendered, min(limits), data.long_prompts, tokenizer) if limits else (rendered, "")
        if said:
            report.append(f"{name}: {said}")
        if not kept:
            report.append(f"{name}: no tasks are left")
            del weights[name]
        tasks.extend(kept)
    if not tasks:
        raise UserError(
            f"no tasks are left: every prompt is longer than {min(limits)} tokens; raise data.max_prompt_tokens or truncate"
        )
    return TaskSet(tasks, {name: weights[name] for name in read if name in weights and read[name]}, report)


def _named(sources: Sequence[DataSource]) -> list[tuple[str, DataSource]]:
    """Each source under a name of its own: the one it was given, else the last part of its path."""
    given = [source.name for source in sources if source.name]
    if len(set(given)) < len(given):
        raise UserError("two data sources have the same name: give each a name of its own")
    taken = set(given)
    named = []
    for source in sources:
        name = source.name
        if not name:
            stem = name = _stem(source.path)
            number = 2
            while name in taken:
                name = f"{stem}-{number}"
                number += 1
            taken.add(name)
        named.append((name, source))
    return named


def _stem(path: str) -> str:
    name = path.rstrip("/").rpartition("/")[2].rpartition(":")[2] or path
    for endings in (COMPRESSED, SUFFIXES):
        for ending in endings:
            name = name.removesuffix(ending) or name
    return name


def _read_source(
    data: DataConfig, source: DataSource, name: str, split: Split, seed: int, limit: int | None, given: GivenRows
) -> tuple[list[Task], str]:
    """A source's first ``limit`` tasks and a line that says what was read."""
    if source.path in given:
        reader = _RowReader(data, source, name, Rows(given[source.path], lambda i: f"{name}[{i}]"))
        tasks = list(islice(reader, limit))
        return tasks, f"{name}: {len(tasks)} tasks given in Python ({reader.columns})"
    if is_given(source.path):
        raise UserError(
            f"the data {name!r} was given in Python, and is in no file: go on from Python with "
            "rlhf_host.train(resume=RUN_DIR, data=...), or give a file with --data"
        )
    path = Path(source.path).expanduser()
    if not path.exists():
        plugin = _find_plugin(source.path)
        if plugin is not None:
            tasks = list(islice(_plugin_tasks(plugin, source, name, split, seed), limit))
            return tasks, f"{name}: {len(tasks)} tasks from {plugin}"
        if looks_like_a_file(source.path):
            siblings = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
            raise UserError(f"{source.path}: no such file or directory{near_matches(path.name, siblings)}")
    if source.options:
        raise UserError(f"{source.path} is not a task plugin, so it takes no options ({', '.join(source.options)})")
    splits = SPLITS[split]
    rows = (
        read_path(path, source.subset, source.split, splits)
        if path.exists()
        else read_hub(source.path, source.subset, source.split, splits)
    )
    reader = _RowReader(data, source, name, rows)
    tasks = list(islice(reader, limit))
    return tasks, f"{name}: {len(tasks)} tasks from {source.path} ({reader.columns}{', ' if rows.note else ''}{rows.note})"


class _RowReader:
    """Rows as tasks; which columns matter is settled at the first row."""

    def __init__(self, data: DataConfig, source: DataSource, name: str, rows: Rows):
        self.rows = rows
        self.name = name
        self.prompt_key = source.prompt_key or data.prompt_key
        self.label_key = source.label_key or data.label_key
        self.agent_key = data.agent_key

    @property
    def columns(self) -> str:
        """Which columns were read, once the first row is."""
        return f"prompt {self.prompt_key!r}, " + (f"label {self.label_key!r}" if self.label_key else "no label")

    def __iter__(self) -> Iterator[Task]:
        for index, row in enumerate(self.rows.rows):
            try:
                if index == 0:
                    self._settle(row)
                yield self._task(row, index)
            except _Malformed as fault:
                raise UserError(f"{self.rows.where(index)}: {fault}") from None

    def _settle(self, row: Mapping[str, Any]) -> None:
        if self.prompt_key is None:
            self.prompt_key = next((key for key in PROMPT_KEYS if key in row), None)
            if self.prompt_key is None:
                columns = ", ".join(row) or "none"
                raise _Malformed(
                    f"no column for the prompt: none of {', '.join(PROMPT_KEYS)} is among {columns}; set data.prompt_key"
                )
        if self.label_key is None:
            self.label_key = next((key for key in LABEL_KEYS if key in row and key != self.prompt_key), None)

    def _task(self, row: Mapping[str, Any], index: int) -> Task:
        assert self.prompt_key is not None
        prompt = _get(row, self.prompt_key, "prompt")
        _check_prompt(prompt, self.prompt_key)
        label = agent = None
        if self.label_key is not None:
            label = _get(row, self.label_key, "label")
            if label is None or label == "":
                raise _Malformed(
                    f"{self.label_key!r} is empty; every row needs a label, or set data.label_key to another column"
                )
        if self.agent_key is not None:
            agent = _get(row, self.agent_key, "agent")
            if agent is not None and not isinstance(agent, str):
                raise _Malformed(f"{self.agent_key!r} must be an agent's name, not {type(agent).__name__}")
        used = {self.prompt_key, self.label_key, self.agent_key}
        metadata = {key: value for key, value in row.items() if key not in used}
        return Task(_clean(prompt), label, metadata, agent or None, index, self.name)


class _Malformed(Exception):
    """What is wrong with a row; the place is added where it is known."""


def _get(row: Mapping[str, Any], key: str, what: str) -> Any:
    if key not in row:
        near = near_matches(key, row)
        raise _Malformed(
            f"no {key!r} (the {what}){near or f'; the row has {chr(44).join(row)}' if row else '; the row is empty'}"
        )
    return row[key]


def _check_prompt(prompt: Any, key: str) -> None:
    if prompt is None:
        raise _Malformed(f"{key!r} is null; give the row a prompt or take it out")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise _Malformed(f"{key!r} is empty; give the row a prompt or take it out")
        return
    if not isinstance(prompt, list):
        raise _Malformed(f"{key!r} must be a text or a list of messages, not {type(prompt).__name__}")
    if not prompt:
        raise _Malformed(f"{key!r} has no messages")
    for number, message in enumerate(prompt, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _Malformed(f'{key!r}: message {number} must be {{"role": ..., "content": ...}}')
        if not isinstance(message.get("content"), str):
            raise _Malformed(f"{key!r}: the content of message {number} ({message['role']}) must be a text")
    if prompt[-1]["role"] == "assistant":
        raise _Malformed(f"{key!r} ends with an assistant's message; end it with what the model is to answer")
    if not prompt[-1]["content"].strip():
        raise _Malformed(f"{key!r} ends with an empty message")


def _clean(prompt: Any) -> Any:
    """Messages without the null fields that columnar formats add."""
    if isinstance(prompt, str):
        return prompt
    return [{key: value for key, value in message.items() if value is not None} for message in prompt]


# --- task plugins -------------------------------------------------------------------------------


def _find_plugin(spec: str) -> Any:
    """The task plugin called ``spec``, or ``None`` where it can only be a hub name. A near miss is an error at once."""
    from rlhf_host.plugins.discovery import discover
    from rlhf_host.plugins.selection import find

    plugins = discover()
    names = [info.name for info in plugins if info.kind == "tasks"]
    if spec in names or (":" in spec and not looks_like_a_file(spec)):
        return find("tasks", spec, plugins)
    if "/" not in spec and not looks_like_a_file(spec) and (near := near_matches(spec, names)):
        raise UserError(f"no file, directory or task plugin is called {spec!r}{near}")
    return None


def _plugin_tasks(info: Any, source: DataSource, name: str, split: Split, seed: int) -> Iterator[Task]:
    from rlhf_host.plugins.manager import Loaded, PluginManager
    from rlhf_host.plugins.selection import build

    if source.subset is not None or source.split is not None:
        raise UserError(f"{info.name} is a task plugin: subset and split are for directories and hub datasets")
    manager = PluginManager([Loaded("tasks", name, info, build(info, source.options, name))])
    try:
        manager.require("load_tasks", f"{info} is a task source")
        found: Iterable[Any] = manager.one("load_tasks", split=split, seed=seed) or ()
        try:
            for index, item in enumerate(found):
                yield _plugin_task(item, index, name, info)
        except UserError:
            raise
        except Exception as error:
            raise PluginError(f"{info}: load_tasks failed: {type(error).__name__}: {' '.join(str(error).split())}") from error
    finally:
        manager.close()


def _plugin_task(item: Any, index: int, name: str, info: Any) -> Task:
    if isinstance(item, Mapping):
        row = dict(item)
        prompt, label, agent = row.pop("prompt", None), row.pop("label", None), row.pop("agent", None)
        item = Task(prompt, label, row, agent)
    try:
        if not isinstance(item, Task):
            raise _Malformed(f"expected a Task or a mapping, got {type(item).__name__}")
        _check_prompt(list(item.prompt) if isinstance(item.prompt, tuple) else item.prompt, "prompt")
    except _Malformed as fault:
        raise PluginError(f"{info}: task {index + 1}: {fault}") from None
    return dataclasses.replace(item, index=index, source=name)


# --- how many and how long ----------------------------------------------------------------------


def _share(read: dict[str, list[Task]], weights: Mapping[str, float], total: int) -> dict[str, list[Task]]:
    """``total`` tasks over the sources by weight; what a short source cannot give goes to the others."""
    taken = dict.fromkeys(read, 0)
    for _ in range(min(total, sum(map(len, read.values())))):
        open_sources = [name for name in read if taken[name] < len(read[name])]
        taken[min(open_sources, key=lambda name: (taken[name] + 1) / weights[name])] += 1
    return {name: tasks[: taken[name]] for name, tasks in read.items()}


def _tokenise(tasks: Sequence[Task], data: DataConfig, tokenizer: Any, batch: int = 512) -> list[Task]:
    rendered = []
    for begin in range(0, len(tasks), batch):
        part = tasks[begin : begin + batch]
        open_tasks = [task for task in part if task.prompt_ids is None]
        made = iter(render_prompts([task.prompt for task in open_tasks], tokenizer, data.system_prompt, data.template))
        for task in part:
            rendered.append(task if task.prompt_ids is not None else dataclasses.replace(task, prompt_ids=tuple(next(made))))
    return rendered


def _bound(tasks: Sequence[Task], limit: int, how: str, tokenizer: Any) -> tuple[list[Task], str]:
    """Tasks whose prompts fit, and what was done to the others."""
    long = sum(len(task.prompt_ids or ()) > limit for task in tasks)
    if not long:
        return list(tasks), ""
    if how == "filter":
        kept = [task for task in tasks if len(task.prompt_ids or ()) <= limit]
        return kept, f"left out {long} of {len(tasks)} tasks: prompt longer than {limit} tokens"
    cut = [dataclasses.replace(task, prompt_ids=_keep_end(task.prompt_ids or (), limit, tokenizer)) for task in tasks]
    return cut, f"cut the beginning of {long} of {len(tasks)} prompts longer than {limit} tokens"


def _keep_end(ids: tuple[int, ...], limit: int, tokenizer: Any) -> tuple[int, ...]:
    if len(ids) <= limit:
        return ids
    if limit > 1 and ids[0] == tokenizer.bos_token_id:
        return (ids[0], *ids[len(ids) - limit + 1 :])
    return ids[len(ids) - limit :]
