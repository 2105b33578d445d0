"""YAML in, with the line of every value, and out again. Words mean what YAML 1.2 says: ``on`` is text, ``1e-5`` a number."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter

from rlhf_host.errors import UserError

LARGEST = 100_000
"""Values of one file, each counted as often as an alias repeats it."""
DEEPEST = 100
LONGEST_INTEGER = 14_000
"""Bits: Python does not print integers of more than 4,300 digits."""

_TAG = "tag:yaml.org,2002:"
_TEXT = {f"{_TAG}{kind}" for kind in ("str", "timestamp", "value")}
_KINDS = {
    MappingNode: {f"{_TAG}map"},
    SequenceNode: {f"{_TAG}seq"},
    ScalarNode: _TEXT | {f"{_TAG}{kind}" for kind in ("bool", "int", "float", "null")},
}


@dataclass(frozen=True, slots=True)
class Located:
    """A value and the place that set it, as messages name it. A mapping or list holds further ``Located``."""

    value: Any
    where: str
    implied: bool = False
    """A plugin's name that nobody wrote: its options were set."""


def read_yaml(path: str | Path, name: str | None = None) -> Located:
    """The file's values; places read ``FILE:LINE: a.b``, and ``name`` stands for the file in them.

    Raises:
        UserError: the file cannot be read, is not YAML, or has a key twice.
    """
    shown, yaml = name or str(path), YAML(typ="safe", pure=True)
    yaml.Composer = _Composer
    try:
        node = yaml.compose(Path(path).read_text(encoding="utf-8"))
        tree = Located({}, f"{shown}:1") if node is None else _NodeReader(shown, yaml).read(node, (), ())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"{shown}: cannot be read: {reason}") from error
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{shown}:{line}: not valid YAML: {error.problem or error.context}") from error
    except YAMLError as error:
        raise UserError(f"{shown}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree.value, dict):
        raise UserError(f"{shown}:1: a configuration is a mapping of sections, such as 'rollout:'")
    return tree


class _Composer(Composer):
    depth = 0

    def compose_node(self, parent: Any, index: int) -> Any:
        self.depth += 1
        if self.depth > DEEPEST:
            problem = f"brackets or indents are nested more than {DEEPEST} deep"
            raise ComposerError(problem=problem, problem_mark=self.parser.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _NodeReader:
    def __init__(self, shown: str, yaml: YAML):
        self.shown, self.yaml, self.count = shown, yaml, itertools.count(1)

    def read(self, node: Node, path: tuple[str, ...], parents: tuple[int, ...], line: int = 0) -> Located:
        """``line``: the key's, if the value belongs to one."""
        line = line or node.start_mark.line + 1
        where = f"{self.shown}:{line}" + (f": {'.'.join(path)}" if path else "")
        if id(node) in parents:
            raise UserError(f"{where}: refers to itself")
        if next(self.count) > LARGEST:
            raise UserError(f"{where}: the file holds more than {LARGEST:,} values; aliases (*NAME) repeat what they name")
        if node.tag not in _KINDS[type(node)]:
            raise UserError(f"{where}: YAML tags are not supported, and this value has {node.tag!r}")
        parents = (*parents, id(node))
        if isinstance(node, MappingNode):
            return Located(dict(self._items(node, path, parents)), where)
        if isinstance(node, SequenceNode):
            return Located([self.read(item, path, parents) for item in node.value], where)
        return Located(self._scalar(node, where), where)

    def _items(self, node: MappingNode, path: tuple[str, ...], parents: tuple[int, ...]) -> Iterator[tuple[str, Located]]:
        lines: dict[str, int] = {}
        merged: dict[str, Located] = {}
        own: list[tuple[str, Located]] = []
        for key, value in node.value:
            line = key.start_mark.line + 1
            merges = key.tag == f"{_TAG}merge"
            if merges and "<<" not in lines:
                lines["<<"] = line
                for source in value.value if isinstance(value, SequenceNode) else [value]:
                    if not isinstance(source, MappingNode):
                        raise UserError(f"{self.shown}:{line}: '<<' takes a mapping, or a list of them")
                    merged = self.read(source, path, parents).value | merged
            elif not isinstance(key, ScalarNode) or not (merges or isinstance(self._scalar(key, self.shown), str)):
                shown = repr(key.value) if isinstance(key, ScalarNode) else "a list or mapping"
                raise UserError(f"{self.shown}:{line}: keys are names, not {shown}")
            elif key.value in lines:
                raise UserError(f"{self.shown}:{line}: {key.value!r} is already set on line {lines[key.value]}")
            else:
                lines[key.value] = line
                own.append((key.value, self.read(value, (*path, key.value), parents, line)))
        yield from [*((key, value) for key, value in merged.items() if key not in lines), *own]

    def _scalar(self, node: Node, where: str) -> Any:
        if node.tag in _TEXT:
            return node.value
        try:
            if node.tag == f"{_TAG}null" and node.value.lower() not in ("", "~", "null"):
                raise ValueError
            value = self.yaml.constructor.construct_object(node)
            if isinstance(value, int) and value.bit_length() > LONGEST_INTEGER:
                raise ValueError
            return value
        except (ValueError, KeyError) as error:  # a number of thousands of digits, or a tag that does not fit
            raise UserError(f"{where}: cannot be read as {str(node.tag).removeprefix(_TAG)}: {node.value[:40]!r}") from error


def located(value: Any, where: str) -> Located:
    """Plain values as a file's are, all set at one place."""
    if isinstance(value, dict):
        return Located({str(key): located(item, where) for key, item in value.items()}, where)
    return Located([located(item, where) for item in value] if isinstance(value, list | tuple) else value, where)


def located_by_path(value: Any, where: str = "", path: str = "") -> Located:
    """The same; the place of each value is its dotted path, after ``where`` if that is given."""
    place = ": ".join(filter(None, (where, path)))
    if isinstance(value, Mapping):
        items = {str(key): located_by_path(item, where, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
        return Located(items, place)
    if isinstance(value, list | tuple):
        return Located([located_by_path(item, where, path) for item in value], place)
    return Located(str(value) if isinstance(value, Path) else value, place)


def plain(tree: Any) -> Any:
    """The values without their places."""
    value = tree.value if isinstance(tree, Located) else tree
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, list) else value


class _Representer(SafeRepresenter):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, text: str) -> Node:
        # These line breaks would be written as they are, and read back as others.
        style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else None
        return self.represent_scalar(f"{_TAG}str", text, style=style)


_Representer.add_representer(str, _Representer.text)
_Representer.add_multi_representer(str, _Representer.text)
_Representer.add_multi_representer(list, SafeRepresenter.represent_list)


def write_yaml(values: dict[str, Any]) -> str:
    """Text that reads back to the same values."""
    yaml, text = YAML(typ="safe", pure=True), io.StringIO()
    yaml.Representer, yaml.width = _Representer, 120
    yaml.default_flow_style = yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.dump(values, text)
    return text.getvalue()
