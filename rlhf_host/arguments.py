"""Arguments of ``rlhf_host.train`` and similar functions as a tree of settings, with the Python objects that names refer to, and
the configuration that they make with files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from rlhf_host.cli.eval import with_defaults
from rlhf_host.cli.plugin_names import left_out
from rlhf_host.config.load import read_config
from rlhf_host.config.merge import add, layer, nested
from rlhf_host.config.problems import Problems
from rlhf_host.config.resolve import Resolved, Use, resolve
from rlhf_host.config.resumed import require_plugins
from rlhf_host.config.schema import DataConfig, RunConfig
from rlhf_host.config.tree import MANY, SHORT, SHORTHANDS, SINGLE, Names, fields_of, lora_path
from rlhf_host.config.yaml_file import Located, located_by_path
from rlhf_host.data.row_reader import PROMPT_KEYS
from rlhf_host.data.sources import SPLITS
from rlhf_host.errors import RunError, UserError, near_matches
from rlhf_host.plugins.hints import of_flag, of_object
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.plugins.python_objects import has_hooks
from rlhf_host.plugins.selection import PYTHON, split_names

Settings = str | Path | Sequence[str | Path]
"""A preset, a recipe or an environment by name, a file, or a list of these, of which later ones override."""


_WORDS = {"with": "extensions", "reward": "rewards", "tracker": "trackers"}
_WORDS |= {"eval.data": "eval_data", "eval.reward": "eval_rewards"}
_KEYS = {argument: key for key, argument in _WORDS.items()}
"""An argument's name → the key that it sets, where another one."""
_WORDS |= {long: name for name, long in SHORT.items()}
"""A flag's name → the argument's, where another one."""
_SECTIONS = {*fields_of(RunConfig), *SHORTHANDS}
_KNOWN = {*_SECTIONS, *(name.replace("-", "_") for name in SHORT), "resume", "force", "config", "dry_run", "disable"}
_FLAG = re.compile(r"(rlhf [^;,\n]*)|(?<![\w/.:@'-])('?)--([a-z][\w.-]*[\w*])\2( (?=[A-Z]{2}|\d))?")


_NAME = re.compile(r"[\w.~/\\:@ -]+")
"""Matches what may name a file, a data set or a task plugin, and perhaps its weight."""


def _is_no_source(value: object) -> bool:
    return isinstance(value, str) and not _NAME.fullmatch(value) and not Path(value).exists()


def _refuse_unknown(path: str, value: Any) -> None:
    """Raises ``UserError`` for a name of another project, and for a mistyped short name, which no file has; other keys are told
    with all that is wrong.
    """
    head = path.partition(".")[0].replace("-", "_")
    if head in _KNOWN or Names().place(head)[1] is not None:
        return
    if (
        hint := of_object(head, value)
        or of_flag(path, value)
        or ("" if near_matches(head, _SECTIONS) else near_matches(head, _KNOWN))
    ):
        raise UserError(f"{path}: no such argument{hint}")


def in_arguments(text: str) -> str:
    """Returns a message with arguments in place of flags: ``rollout.stop=TEXT`` for ``--rollout.stop TEXT``. Commands of ``rlhf``
    stay as they are.
    """

    def argument(found: re.Match[str]) -> str:
        command, _, flag, space = found.groups()
        head = (flag or "").partition(".")[0].replace("-", "_")
        if flag and head not in _KNOWN and Names().place(head)[1] is None:
            return found[0]
        return command or _WORDS.get(flag, flag).replace("-", "_") + ("=" if space else "")

    return _FLAG.sub(argument, text)


@contextmanager
def speaking() -> Iterator[None]:
    """Lets the messages of errors speak of arguments, not of flags."""
    try:
        yield
    except (UserError, RunError) as error:
        error.args = (in_arguments(str(error)),)
        raise


class Arguments:
    """Settings in the form of a file; Python objects among them are called ``python:NAME``.

    Args:
        named: the parameters by name; ``None``: not given.
        settings: all other settings, by key or dotted key.
        known: arguments of an earlier run, for the objects that its settings name.
        short: short names of settings → their whole names.
    """

    def __init__(
        self,
        named: Mapping[str, Any],
        settings: Mapping[str, Any],
        known: Arguments | None = None,
        short: Mapping[str, str] = SHORT,
    ):
        self.objects: dict[tuple[str, str], Any] = dict(known.objects) if known else {}
        self.rows: dict[str, Iterable[Mapping[str, Any]]] = dict(known.rows) if known else {}
        self.new: set[tuple[str, str]] = set()
        settings = dict(settings)
        disable = settings.pop("disable", None)
        self.left_out = list(disable) if isinstance(disable, list | tuple | set) else [disable]
        problems, names = Problems(), Names()
        self.settings = Located({}, "")
        given = [(name, value) for name, value in named.items() if value is not None] + list(settings.items())
        for typed, value in given:
            path = _KEYS.get(typed, typed)
            if value is None and names.place(path)[1]:
                continue
            _refuse_unknown(path, value)
            path = path.replace("extensions", "with") if path.partition(".")[0] == "extensions" else path
            path = short.get(path.replace("_", "-"), path).replace("-", "_")
            value = {} if value is True and names.place(path)[1] else value  # wandb=True
            head, *rest = path.split(".")
            place = names.place(head)[0]
            keys = [head, *map(str, lora_path((*place, *rest))[len(place) :])]
            tree = self._named(reduce(lambda inner, key: {key: inner}, reversed(keys), self._checked(path, value)))
            part = nested(tuple(keys), located_by_path(reduce(getitem, keys, tree), path=typed))
            self.settings = add(self.settings, layer(part, names, problems), problems)
        problems.refuse()

    def _named(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Returns settings with names in place of objects."""
        if isinstance(evaluation := tree.get("eval"), Mapping):
            return {"eval": self._named({**evaluation})} if "reward" in evaluation else tree
        for key, value in tree.items():
            if key in SINGLE:
                tree[key] = self._choice(SINGLE[key], value)
            elif key in MANY:
                tree[key] = self._choices(MANY[key], value)
        return tree

    def _checked(self, path: str, value: Any) -> Any:
        if path == "actor.model" and not isinstance(value, str | Path):
            raise UserError(
                f"model is a directory, hub name or GGUF file, not {type(value).__name__}: write it with save_pretrained first"
            )
        if path == "eval" and isinstance(value, Mapping) and "data" in value:
            return {**value, "data": self._checked("eval.data", value["data"])}
        if path not in ("data", "eval.data"):
            return value
        rows = _rows(value, "eval" if path == "eval.data" else "train")
        if rows is not None:
            spec = f"{PYTHON}:{path.replace('.', '_')}"
            self.rows[spec] = rows
            return {"sources": [spec]}
        if not isinstance(value, str | Path | list | tuple | Mapping | None):
            raise UserError(f"{path} is a path, a name, or rows with a prompt each, not {type(value).__name__}")
        if isinstance(value, list | tuple) and (text := next(filter(_is_no_source, value), None)) is not None:
            raise UserError(
                f"{path} has {text!r}, which is no file and no name: rows are dictionaries, [{{'prompt': {text!r}}}]"
            )
        return value if isinstance(value, Mapping) else {"sources": [] if value is None else value}

    def _choices(self, kind: str, value: Any) -> Any:
        if isinstance(value, Mapping) and (isinstance(value.get("name", {}), Mapping) or "name" not in value):
            return {alias: self._choice(kind, choice, alias) for alias, choice in value.items()}
        items = split_names(value) if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
        return [self._choice(kind, choice) for choice in items]

    def _choice(self, kind: str, value: Any, alias: str | None = None) -> Any:
        """Returns the choice in the form of a file, with a name in place of an object."""
        if isinstance(value, Mapping):
            return {**value, **({"name": self._choice(kind, value["name"], alias)} if "name" in value else {})}
        if value is None or isinstance(value, str):
            return value
        name = alias or _name_of(kind, value)
        if (kind, name) in self.new and self.objects[kind, name] is not value:
            raise UserError(f"two objects are called {name!r}: give a mapping of aliases, {{'one': ..., 'other': ...}}")
        self.objects[kind, name] = value
        self.new.add((kind, name))
        return f"{PYTHON}:{name}"


@contextmanager
def configured(
    asked: Arguments, use: Use, config: Settings | None, checkpoint: str | None = None, resume: Path | None = None
) -> Iterator[tuple[Resolved, PluginManager]]:
    """Returns the configuration, complete, and its plugins. Raises ``UserError``, one line per mistake."""
    configs: list[Any] = [] if config is None else list(config) if isinstance(config, list | tuple) else [config]
    if wrong := [each for each in configs if not isinstance(each, str | Path)]:
        hint = of_object("config", wrong[0]) or ": give settings as arguments"
        raise UserError(f"config names files and presets, and has {type(wrong[0]).__name__}{hint}")
    with ExitStack() as stack:
        stack.enter_context(left_out(asked.left_out))
        loaded = read_config([*configs, asked.settings], quickstart=use != "replay")
        for notice in loaded.notices:
            print(in_arguments(notice), file=sys.stderr)
        if resume is not None:
            require_plugins(resume, loaded.config)
        chosen = with_defaults(loaded.config, checkpoint) if use == "evaluate" else loaded.config
        run = resolve(chosen, loaded.origins, use, asked.objects)
        local_only = [name for kind, name in asked.new if kind in ("algo", "extension")]
        if local_only and run.traits.runtime.remote:
            raise UserError(
                f"{local_only[0]!r} is a Python object, and the runtime {run.config.runtime.name} has workers in other processes: "
                "leave runtime out, or install it as a plugin (rlhf plugins new)"
            )
        yield run, stack.enter_context(closing(run.plugins()))


def _name_of(kind: str, value: Any) -> str:
    """Returns a name that flags can spell."""
    if not callable(value) and not has_hooks(value):
        what = f"{kind}: {type(value).__name__} is neither a plugin's name nor an object with hooks"
        raise UserError(what + of_object(kind, value))
    name = getattr(value, "__name__", None) or type(value).__name__
    return name if name.isidentifier() else kind  # a lambda


def _of_columns(columns: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Returns the rows of columns, or None for a mapping of something else. Raises ``UserError`` for columns of different
    lengths.
    """
    if any(isinstance(column, str | Mapping) or not hasattr(column, "__getitem__") for column in columns.values()):
        return None
    if scalars := [name for name, column in columns.items() if getattr(column, "ndim", 1) == 0]:
        raise UserError(f"data: the column {scalars[0]!r} is a single value, not one for each row")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"data: its columns have different lengths: {', '.join(f'{name} {n}' for name, n in lengths.items())}")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _rows(value: Any, split: str) -> Iterable[Mapping[str, Any]] | None:
    """Returns rows in memory, or None for a value that names a source or is a section of settings."""
    if isinstance(value, str | Path):
        return None
    if isinstance(value, Mapping):
        if not hasattr(value, "column_names"):
            return None if value.keys() <= fields_of(DataConfig).keys() or "sources" in value else _of_columns(value)
        for name in SPLITS[split]:  # the splits of a dataset
            if name in value:
                return value[name]
        raise UserError(f"the dataset has the splits {', '.join(value)}: give one of them, data=dataset[SPLIT]")
    if hasattr(value, "to_dict") and hasattr(value, "columns"):
        return value.to_dict("records")
    if hasattr(value, "column_names"):  # a dataset is not copied
        return value
    if isinstance(value, Iterable):
        value = list(value)
        # a mapping with a path and no prompt names a source
        rows = [row for row in value if isinstance(row, Mapping) and ("path" not in row or set(row) & set(PROMPT_KEYS))]
        if rows and len(rows) < len(value):
            raise UserError("data mixes rows and names of sources: give one or the other")
        return value if rows or not value else None
    return None
