"""Loading of tasks from data settings: files, directories, hub names and task plugins, checked, rendered and bounded in length."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, TypeVar

from rlhf_host.config.resolve import EVAL_REWARD
from rlhf_host.config.schema import DataConfig, DataSource
from rlhf_host.data.bad_rows import BadRows, Malformed
from rlhf_host.data.chat import Prompts, encode_prompts
from rlhf_host.data.contents import text_of
from rlhf_host.data.pictures import MEMORY
from rlhf_host.data.plain import plain_rows
from rlhf_host.data.processor import Processor, refuse_unseen
from rlhf_host.data.row_context import RowContext
from rlhf_host.data.row_reader import RowReader, prompt_of, seen
from rlhf_host.data.rows import COMPRESSED, SUFFIXES, Rows, looks_like_a_file, read_hub, read_path
from rlhf_host.data.stream import IndexedTasks, ReadTasks, Source, TaskSet
from rlhf_host.data.templates import for_chat, rendering
from rlhf_host.errors import PluginError, UserError, failing_as, near_matches, near_siblings
from rlhf_host.plugins.discovery import PluginInfo, discover
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.plugins.python_files import is_in_file
from rlhf_host.plugins.selection import build, find, is_object
from rlhf_host.protocols.data import PythonRows, Split
from rlhf_host.records.episodes import Task
from rlhf_host.records.pictures import Pictured

SPLITS: dict[str, tuple[str, ...]] = {"train": ("train",), "eval": ("test", "validation", "eval", "dev")}
"""Names of splits, in the order in which they are tried if a directory or hub dataset has several and none is named."""


NO_ROWS: PythonRows = {}
LOOKED_AT = 100  # prompts of a source that are compared with what the tokenizer reads
_BATCH = 512  # prompts: a tokenizer's encodings take many times the memory of their ids
_Items = TypeVar("_Items", bound=Sequence[Any])


def load_tasks(
    data: DataConfig,
    *,
    split: Split,
    tokenizer: Any,
    seed: int,
    max_prompt_tokens: int | None = None,
    rows: PythonRows = NO_ROWS,
    manager: PluginManager | None = None,
    first: int | None = None,
) -> TaskSet:
    """Returns the tasks of all sources, in file order, with prompts rendered and tokenised. Task plugins that return neither a
    list nor a tuple make their tasks as they are drawn, except for evaluation and if the number of samples is bounded.

    Each source's ``path`` is a file or directory if there is one, else the name of a task plugin, else a hub dataset; or one of
    ``rows``. ``max_samples`` of a source takes its first rows; that of ``data`` is shared over the sources by weight, the first
    rows of each. Prompts longer than ``data.max_prompt_tokens`` or ``max_prompt_tokens`` (the model's own limit), whichever is
    smaller, are left out or cut according to ``data.long_prompts``, and counted in the report. Task plugins join ``manager``,
    the run's. With ``first`` only so many rows of each source are read, to look at them.

    Raises ``UserError`` for data that cannot be found or read, naming file and line of the first malformed row.
    """
    if not data.sources:
        raise UserError("no data: give --data a file, a directory, a hub name or a task plugin's name")
    longest = min((limit for limit in (data.max_prompt_tokens, max_prompt_tokens) if limit is not None), default=None)
    prompts = Prompts(for_chat(tokenizer, data), data.system_prompt, data.template)
    manager = PluginManager([]) if manager is None else manager
    reader = _SourceReader(data, split, prompts, tokenizer, seed, longest, rows, manager, first)
    report: list[str] = []
    read: dict[str, Source] = {}
    for name, source in named(data.sources):
        most = min((most for most in (source.max_samples, data.max_samples) if most is not None), default=None)
        read[name], line = reader.read(source, name, most)
        if not isinstance(read[name], ReadTasks) and not read[name]:
            raise UserError(f"{source.path} has no rows ({line})")
        report.append(f"{line}; {rendering(tokenizer, data.template)}")
    weights = {name: source.weight for name, source in named(data.sources)}
    listed = {name: tasks for name, tasks in read.items() if isinstance(tasks, list)}
    if data.max_samples is not None:
        listed = share(listed, weights, data.max_samples)
    for name, tasks in listed.items():
        if lost := unreadable(tasks[:LOOKED_AT], tokenizer):
            shown = " ".join(lost[:10]) + (f" and {len(lost) - 10} more" if len(lost) > 10 else "")
            report.append(f"{name}: the tokenizer has no tokens for {shown}, so the model does not see them in its prompts")
        read[name], line = reader.within_limit(tasks)
        if line:
            report.append(f"{name}: {line}")
        if not read[name]:
            report.append(f"{name}: no tasks are left")
            del weights[name], read[name]
    if not read:
        raise UserError(
            f"no tasks are left: every prompt is longer than {longest} tokens, which is all that data.max_prompt_tokens,"
            " rollout.max_tokens and the model's context allow; data.long_prompts truncate keeps their ends"
        )
    return TaskSet(read, weights, report)


def unreadable(tasks: Iterable[Task], tokenizer: Any) -> list[str]:
    """Returns the characters of prompts that are not in what the tokenizer reads them as, whatever their case and form."""

    def folded(text: str) -> set[str]:
        return {char for char in unicodedata.normalize("NFKC", text).casefold() if not char.isspace()}

    lost: set[str] = set()
    for task in tasks:
        whole = task.prompt if isinstance(task.prompt, str) else " ".join(text_of(each.get("content")) for each in task.prompt)
        lost |= folded(whole) - folded(tokenizer.decode(list(task.prompt_ids or ())))
    return sorted(lost)


def named(sources: Sequence[DataSource]) -> list[tuple[str, DataSource]]:
    """Returns each source under a unique name: its given name, else the last part of its path."""
    chosen = [source.name for source in sources if source.name]
    if len(set(chosen)) < len(chosen):
        raise UserError("two data sources have the same name: give each a name of its own")
    taken = set(chosen)
    chosen_names = []
    for source in sources:
        stem = _stem(source.path)
        numbered = chain([stem], (f"{stem}-{number}" for number in count(2)))
        name = source.name or next(name for name in numbered if name not in taken)
        taken.add(name)
        chosen_names.append((name, source))
    return chosen_names


def _stem(path: str) -> str:
    name = path.rstrip("/").rpartition("/")[2].rpartition(":")[2] or path
    for ending in (*COMPRESSED, *SUFFIXES):
        name = name.removesuffix(ending) or name
    return name


def open_source(source: DataSource, name: str, split: Split, rows: PythonRows) -> Rows | PluginInfo:
    """Returns the rows that a source names, or the task plugin. Raises ``UserError`` if there is neither."""
    if source.path in rows:
        return Rows(plain_rows(rows[source.path]), lambda i: f"{name}[{i}]")
    if is_object(source.path):
        raise UserError(
            f"the data {name!r} was given in Python, and is not in a file: continue from Python with "
            "rlhf_host.train(resume=RUN_DIR, data=...), or give a file with --data"
        )
    path = Path(source.path).expanduser()
    if not path.exists():
        plugin = _find_plugin(source.path)
        if plugin is not None:
            return plugin
        if looks_like_a_file(source.path):
            raise UserError(f"{source.path}: no such file or directory{near_siblings(path)}")
    if source.options:
        raise UserError(f"{source.path} is not a task plugin, so it takes no options ({', '.join(source.options)})")
    where = (source.subset, source.split, SPLITS[split])
    return read_path(path, *where) if path.exists() else read_hub(source.path, *where)


@dataclass(frozen=True, slots=True)
class _SourceReader:
    """Reads tasks of one split from sources, with prompts rendered, tokenised and bounded in length."""

    data: DataConfig
    split: Split
    prompts: Prompts
    tokenizer: Any
    seed: int
    longest: int | None
    """Maximum tokens of a prompt."""
    rows: PythonRows
    manager: PluginManager
    first: int | None

    def read(self, source: DataSource, name: str, limit: int | None) -> tuple[Source, str]:
        """Returns a source's first ``limit`` tasks and a line about what was read."""
        rows, most = open_source(source, name, self.split, self.rows), min(limit or sys.maxsize, self.first or sys.maxsize)
        if isinstance(rows, PluginInfo):
            return self.plugin_tasks(rows, source, name, limit, most)
        reader = RowReader(self.data, source, name, rows)
        tasks = self._tokenised(self._judged(reader.read(most), reader.bad, reader), reader.bad)
        origin = "given in Python" if source.path in self.rows else f"from {source.path}"
        about = f"{reader.columns}{', ' if rows.note else ''}{rows.note}"
        line = f"{name}: {len(tasks)} task{'s' * (len(tasks) != 1)} {origin} ({about}){reader.bad.summary}"
        return tasks, line + _seen(tasks, reader)

    def plugin_tasks(self, info: PluginInfo, source: DataSource, name: str, limit: int | None, most: int) -> tuple[Source, str]:
        """Returns the tasks of a plugin, which joins the run's others, and a line about them."""
        if source.subset is not None or source.split is not None:
            raise UserError(f"{info.name} is a task plugin: subset and split are for directories and hub datasets")
        manager, kind = self.manager, "tasks" if self.split == "train" else "eval_tasks"
        plugin = Loaded(kind, name, info, build(info, source.options, name))
        manager.add(plugin)
        if plugin.key not in manager.names("load_tasks"):
            raise PluginError(f"{info} has no load_tasks hook, so it gives no tasks")

        def load() -> Any:
            entries = manager.call(plugin.key, "load_tasks", split=self.split, seed=self.seed)
            return () if entries is None else entries

        entries = load()
        numbered = hasattr(entries, "__len__") and hasattr(entries, "__getitem__")
        for chooser in () if numbered or limit or self.split == "eval" else manager.names("draw_tasks"):
            problem = f"{chooser} chooses tasks by their numbers, and the source {name} has none: leave one of them out"
            raise UserError(f"{problem}, or give --data.{name}.max-samples, and so many tasks are read at the start")
        if isinstance(entries, list | tuple) or most < sys.maxsize or self.split == "eval":
            bad = BadRows(lambda index: f"{name}, task {index + 1}", stops=self.data.on_bad_row == "stop")
            tasks = list(islice(_plugin_tasks(entries, name, info), most))
            tasks = self._tokenised(self._judged(tasks, bad), bad)
            return tasks, f"{name}: {len(tasks)} tasks from {info}{bad.summary}"
        if numbered:

            def make(index: int) -> Task:
                with failing_as(PluginError, f"{info}: load_tasks failed", own=(UserError,)):
                    return self.prepare(_plugin_task(entries[index], index, name, info))

            made = IndexedTasks(len(entries), make, self.fits)
            return made, f"{name}: {len(entries)} tasks from {info}, made as they are drawn"

        keeps_place = plugin.key in manager.names("state_dict")
        first = [] if keeps_place else [entries]  # its own state may come from a checkpoint first

        def begin(before: int) -> Iterator[Task]:
            return map(self.prepare, _plugin_tasks(first.pop() if first else load(), name, info, before))

        line = f"{name}: tasks from {info}, read in its own order as they are drawn"
        return ReadTasks(begin, self.fits, keeps_place=keeps_place), line

    def prepare(self, task: Task) -> Task:
        """Prepares one task; cuts a prompt that is too long if ``data.long_prompts`` says so."""
        return self._cut(self._tokenised([task])[0])

    def fits(self, task: Task) -> bool:
        return self.longest is None or len(task.prompt_ids or ()) <= self.longest

    def within_limit(self, tasks: list[Task]) -> tuple[list[Task], str]:
        """Returns the tasks that stay, and a note on what was done to the others."""
        short = [task for task in tasks if self.fits(task)]
        if not (long := len(tasks) - len(short)):
            return tasks, ""
        if self.data.long_prompts == "filter":
            return short, f"left out {long} of {len(tasks)} tasks: prompt longer than {self.longest} tokens"
        cut = [self._cut(task) for task in tasks]
        return cut, f"cut the beginning of {long} of {len(tasks)} prompts longer than {self.longest} tokens"

    def _judged(self, tasks: list[Task], bad: BadRows, reader: RowReader | None = None) -> list[Task]:
        """Returns the tasks whose labels can be used; the others are counted as bad, or raise an error."""
        loaded = [self.manager.by_key[key] for key in self.manager.names("check_labels")]
        own = any(item.kind == EVAL_REWARD for item in self.manager.loaded)
        idle = "reward" if self.split == "eval" and own else EVAL_REWARD
        faults: dict[int, str] = {}
        for item in (item for item in loaded if item.kind != idle and item.weight):
            asked = [n for n, task in enumerate(tasks) if item.kind != "agent" or task.agent in (None, item.alias)]
            found = self.manager.call(item.key, "check_labels", tasks=[tasks[n] for n in asked]) or {}
            for place, problem in found.items():
                faults.setdefault(asked[place], f"{item.key} cannot judge the row: {problem}")
        for place, problem in sorted(faults.items()):
            task = tasks[place]
            if reader is not None and task.ground_truth is None and "label" in problem:
                problem += f"; its columns are {reader.columns_of(task)}: name the one with the label, --data.label-key NAME"
                if reader.label_key is None:  # nor has any other row one
                    bad.add(task.index, Malformed(problem, whole=True))
            bad.add(task.index, Malformed(problem))
        return [task for place, task in enumerate(tasks) if place not in faults] if faults else tasks

    def _tokenised(self, tasks: Sequence[Task], bad: BadRows | None = None) -> list[Task]:
        """Returns the tasks with the tokens of their prompts; empty prompts are counted as bad, or raise an error."""
        done: list[Task] = []
        for begin in range(0, len(tasks), _BATCH):
            texts: list[tuple[Task, str | None]] = []
            for task in tasks[begin : begin + _BATCH]:
                try:
                    texts.append((task, self._text(task)))
                except UserError as error:
                    _raise_or_count(task, str(error), bad)
            written = [text for _, text in texts if text is not None]
            ids = iter(encode_prompts(written, self.prompts.writer.tokenizer, chat=self.prompts.chat))
            for task, text in texts:
                try:
                    made = task if text is None else replace(task, prompt_ids=self._with_pictures(task, next(ids), text))
                except UserError as error:
                    _raise_or_count(task, str(error), bad)
                    continue
                if made.prompt_ids:
                    done.append(made)
                else:
                    _raise_or_count(task, f"the tokenizer has no token for its prompt, {str(task.prompt)[:40]!r}", bad)
        return done

    def _with_pictures(self, task: Task, ids: list[int], text: str) -> tuple[int, ...]:
        """Returns a prompt's tokens with those of its pictures."""
        if not task.images:
            refuse_unseen(self.tokenizer, ids, text=text)
            return tuple(ids)
        return Pictured(Processor.of(self.tokenizer).expand(ids, task.images, text), task.images)

    def _text(self, task: Task) -> str | None:
        if task.prompt_ids is not None:
            return None
        return self.prompts.text(task.prompt, RowContext(None, task.tools, task.template_kwargs))

    def _cut(self, task: Task) -> Task:
        if self.fits(task) or self.longest is None or self.data.long_prompts == "filter":
            return task
        if task.images:
            raise UserError(
                f"{task.source}, task {task.index + 1}: a prompt of {len(task.prompt_ids or ())} tokens with pictures cannot be cut"
                f" to {self.longest}: set data.long_prompts filter, or data.max_prompt_tokens higher"
            )
        return replace(task, prompt_ids=_keep_end(task.prompt_ids or (), self.longest, self.tokenizer))


# --- task plugins -------------------------------------------------------------------------------


def _find_plugin(spec: str) -> PluginInfo | None:
    """Returns the task plugin called ``spec``, or None if it can only be a hub name. Raises an error for a near miss."""
    plugins = discover()
    names = [info.name for info in plugins if info.kind == "tasks"]
    if spec in names or is_in_file(spec) or (":" in spec and not looks_like_a_file(spec)):
        return find("tasks", spec, plugins)
    if "/" not in spec and not looks_like_a_file(spec) and (near := near_matches(spec, names)):
        raise UserError(f"no file, directory or task plugin is called {spec!r}{near}")
    return None


def _seen(tasks: Sequence[Task], reader: RowReader) -> str:
    """Returns how many tasks have pictures, and which column may have some that are not read."""
    if count := sum(bool(task.images) for task in tasks):
        return f"; {count} with pictures"
    return "" if reader.unread is None else f"; no pictures are read: {reader.unread!r} may have some, and is not called images"


def _raise_or_count(task: Task, problem: str, bad: BadRows | None) -> None:
    if bad is None:
        raise UserError(f"{task.source}, task {task.index + 1}: {problem}")
    bad.add(task.index, Malformed(problem))


def _plugin_tasks(entries: Iterable[Any], name: str, info: PluginInfo, before: int = 0) -> Iterator[Task]:
    with failing_as(PluginError, f"{info}: load_tasks failed", own=(UserError,)):
        for index, item in enumerate(entries, before):
            yield _plugin_task(item, index, name, info)


def _plugin_task(item: Any, index: int, name: str, info: Any) -> Task:
    if isinstance(item, Mapping):
        row = dict(item)
        prompt, label, agent = row.pop("prompt", None), row.pop("label", None), row.pop("agent", None)
        item = Task(prompt, label, row, agent, images=row.pop("images", ()))
    try:
        if not isinstance(item, Task):
            raise Malformed(f"expected a Task or a mapping, got {type(item).__name__}")
        prompt = prompt_of(list(item.prompt) if isinstance(item.prompt, tuple) else item.prompt, "prompt")
        return seen(replace(item, prompt=prompt, index=index, source=name), MEMORY)
    except Malformed as fault:
        raise PluginError(f"{info}: task {index + 1}: {fault}") from None


# --- how many and how long ----------------------------------------------------------------------


def share(read: Mapping[str, _Items], weights: Mapping[str, float], total: int) -> dict[str, _Items]:
    """Divides ``total`` tasks or units among the sources by weight; the others make up for a source that is too short."""
    taken = dict.fromkeys(read, 0)
    for _ in range(min(total, sum(map(len, read.values())))):
        open_sources = [name for name in read if taken[name] < len(read[name])]
        taken[min(open_sources, key=lambda name: (taken[name] + 1) / weights[name])] += 1
    return {name: tasks[: taken[name]] for name, tasks in read.items()}  # type: ignore[misc]


def _keep_end(ids: tuple[int, ...], limit: int, tokenizer: Any) -> tuple[int, ...]:
    if limit > 1 and ids[0] == tokenizer.bos_token_id:
        return (ids[0], *ids[len(ids) - limit + 1 :])
    return ids[len(ids) - limit :]
