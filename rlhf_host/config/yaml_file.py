"""Configuration files: YAML in with line numbers, YAML out whole or not at all.

Words mean what YAML 1.2 says: ``on``, ``off`` and ``no`` are text, ``1e-5`` is a number.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlhf_host.config.schema import RunConfig
from rlhf_host.config.sections import MANY, NONE, SINGLE
from rlhf_host.errors import UserError

_WORDS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+.0123456789"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own class attribute)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.Node:
    # PyYAML writes these line breaks as they are, and reads them back as others.
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


for _tag, _pattern, _first in _WORDS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value, 16 if "x" in node.value else 10))
_Dumper.add_multi_representer(list, lambda dumper, data: dumper.represent_list(data))
_Dumper.add_representer(str, _represent_text)


@dataclass(frozen=True, slots=True)
class At:
    """A value and the place it was set. ``value`` of a mapping or list holds further ``At``."""

    value: Any
    where: str


def read_yaml(path: str | Path, name: str | None = None) -> At:
    """The file as a tree of ``At`` whose places read ``FILE:LINE: a.b``; ``name`` stands for the file in them.

    Raises:
        UserError: the file cannot be read, is not YAML, or has a key twice.
    """
    shown = name or str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"{shown}: cannot be read: {reason}") from error
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        tree = At({}, f"{shown}:1") if node is None else _build(loader, node, shown, (), ())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{shown}:{line}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{shown}: not valid YAML: {' '.join(str(error).split())}") from error
    finally:
        loader.dispose()
    if not isinstance(tree.value, dict):
        raise UserError(f"{shown}:1: a configuration is a mapping of sections, such as 'rollout:'")
    return tree


def _build(loader: _Loader, node: yaml.Node, shown: str, path: tuple[str, ...], parents: tuple[int, ...]) -> At:
    line = node.start_mark.line + 1
    place = f"{shown}:{line}: {'.'.join(path)}" if path else f"{shown}:{line}"
    if id(node) in parents:
        raise UserError(f"{place}: refers to itself")
    parents = (*parents, id(node))
    if isinstance(node, yaml.MappingNode):
        _refuse_duplicates(node, shown)
        loader.flatten_mapping(node)
        built: dict[Any, At] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise UserError(f"{shown}:{key_node.start_mark.line + 1}: keys are names, not {key_node.value!r}")
            child = _build(loader, value_node, shown, (*path, key), parents)
            # The key's line, not the line on which a nested value begins.
            built[key] = At(child.value, f"{shown}:{key_node.start_mark.line + 1}: {'.'.join((*path, key))}")
        return At(built, place)
    if isinstance(node, yaml.SequenceNode):
        return At([_build(loader, item, shown, path, parents) for item in node.value], place)
    return At(loader.construct_object(node), place)


def _refuse_duplicates(node: yaml.MappingNode, shown: str) -> None:
    seen: dict[str, int] = {}
    for key_node, _ in node.value:
        line = key_node.start_mark.line + 1
        if isinstance(key_node.value, str) and key_node.tag != "tag:yaml.org,2002:merge":
            if key_node.value in seen:
                raise UserError(f"{shown}:{line}: {key_node.value!r} is already set on line {seen[key_node.value]}")
            seen[key_node.value] = line


def plain(tree: Any) -> Any:
    """The tree without its places."""
    if isinstance(tree, At):
        return plain(tree.value)
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    # type(): a flag's Repeated stays one
    return type(tree)(plain(item) for item in tree) if isinstance(tree, list) else tree


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The file as plain values, as written."""
    return plain(read_yaml(path))


def dump_yaml(config: RunConfig) -> str:
    """The whole configuration as YAML that loads back to the same configuration."""
    data = config.model_dump()
    for key in SINGLE:
        if data[key] is not None:
            del data[key]["weight"]
    for key in MANY:
        if key != "reward":
            for choice in data[key].values():
                del choice["weight"]
    # Console and jsonl come back on their own unless something says they are gone.
    gone = [alias for alias in RunConfig().tracker if alias not in data["tracker"]]
    data["tracker"] |= {alias: {"plugin": NONE, "options": {}} for alias in gone}
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def save_config(config: RunConfig, path: str | Path) -> None:
    """Write ``dump_yaml(config)``: aside, synced, then renamed."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.partial")
    try:
        with open(aside, "w", encoding="utf-8") as file:
            file.write(dump_yaml(config))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
