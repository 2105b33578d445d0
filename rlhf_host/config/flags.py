"""Flags: ``--rollout.n 4``, ``--reward strict=math_verifier``, ``--algo.clip-eps 0.2`` as a layer of settings.

Every flag takes the text that follows it; without any it stands for ``true``. There are no positional arguments, so a flag's
value is whatever does not begin with ``--`` and is not ``-h`` or ``-o`` (``--flag=--value`` gives such a one). Kebab and snake
case are the same.
"""

from __future__ import annotations

import collections.abc
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_origin

from pydantic import TypeAdapter

from rlhf_host.config.flag_names import of_plugin, option_examples, what_is_meant
from rlhf_host.config.merge import add, nested
from rlhf_host.config.problems import Path, Problems
from rlhf_host.config.tree import (
    DATA,
    SHORT,
    Names,
    annotation_at,
    canonical,
    fields_of,
    holds_sections,
    is_choice,
    is_selection,
    lora_path,
)
from rlhf_host.config.yaml_file import Located
from rlhf_host.errors import UserError
from rlhf_host.plugins.hints import of_flag
from rlhf_host.plugins.options import members, nested_model
from rlhf_host.plugins.selection import split_names

SWITCHES = ("help", "print-config", "dry-run", "force", "json", "time", "measure-answers")
"""Control flags that take no value."""

LETTERS = {"-h": "--help", "-o": "--output"}
"""Flags of one letter → what they stand for."""

REPEATED = ("config", "disable")
"""Control flags that may be given several times."""


@dataclass(frozen=True, slots=True)
class Flag:
    name: str
    """Name as typed, without the dashes and the value."""
    value: str | None
    long: str | None = None
    """The setting's whole name, if a short one was typed."""

    @property
    def text(self) -> str:
        return f"--{self.name}"

    @property
    def keys(self) -> list[str]:
        return [part.replace("-", "_") for part in (self.long or self.name).split(".")]


def parse(argv: Sequence[str], short: Mapping[str, str] = SHORT) -> list[Flag]:
    """Split the command line into flags.

    Args:
        short: short names of settings → their whole names.

    Raises:
        UserError: something else where a flag should be.
    """
    flags: list[Flag] = []
    rest = [LETTERS.get((parts := word.partition("="))[0], parts[0]) + parts[1] + parts[2] for word in argv]
    while rest:
        token = rest.pop(0)
        if not token.startswith("--") or len(token) < 3:
            name, _, value = token.partition("=")
            hint = f"; did you mean '--{token.lstrip('-')}'?" if token.startswith("-") and token.lstrip("-") else ""
            hint = of_flag(name, value) or (of_flag(flags[-1].name) if flags else "") or hint or of_plugin(token)
            raise UserError(f"unexpected argument {token!r}: flags look like --rollout.n 8{hint}")
        name, equals, value = token[2:].partition("=")
        alone = name in SWITCHES or not rest or rest[0].startswith("--")
        text = value if equals else None if alone else rest.pop(0)
        flags.append(Flag(name, text, short.get(name.replace("_", "-"))))
    return flags


def take(flags: Sequence[Flag], control: Collection[str]) -> tuple[dict[str, list[str | None]], list[Flag]]:
    """The command's own flags (``config``, ``dry-run``, ...) with their values, and all others."""
    own: dict[str, list[str | None]] = {}
    others = []
    for flag in flags:
        name = flag.name.replace("_", "-")
        if name in control:
            own.setdefault(name, []).append(flag.value)
        else:
            others.append(flag)
    for name, values in own.items():
        if name in SWITCHES:
            if any(value not in (None, "true") for value in values):
                raise UserError(f"--{name} takes no value")
        elif None in values:
            raise UserError(f"--{name} needs a value")
        elif len(values) > 1 and name not in REPEATED:
            raise UserError(f"--{name} can be given once")
    return own, others


# --- from flags to a layer ----------------------------------------------------------------------


def from_flags(flags: Sequence[Flag], names: Names, problems: Problems, control: Collection[str] = ()) -> Located:
    """The flags as a layer; ``control`` is for near matches."""
    settings: dict[Path, list[Flag]] = {}
    parts: dict[Path, Located | None] = {}
    """Places in the order of the flags → a name that nobody wrote, or ``None`` for what ``settings`` have there."""
    for flag in flags:
        head, *rest = flag.keys
        place, plugin = names.place(head)
        path = lora_path((*place, *rest))
        if plugin is not None:
            parts.setdefault((*place, 0), nested((*place, "name"), Located(plugin, flag.text, implied=True)))
        if plugin is not None and not rest:
            if flag.value is not None:
                examples = option_examples(plugin, flag.text)
                problems.lines.append(f"{flag.text} takes no value: set an option of {plugin!r}, {examples}")
        elif (problem := _problem(flag, path, names, control, flags)) is not None:
            problems.lines.append(problem)
        else:
            parts[path] = None
            settings.setdefault(path, []).append(flag)
    layer = Located({}, "")
    for path, part in parts.items():
        if part is None and (value := _value(path, settings[path], problems)) is not None:
            part = nested(path, value)
        if part is not None:
            layer = add(layer, part, problems)
    return layer


def _problem(flag: Flag, path: Path, names: Names, control: Collection[str], flags: Sequence[Flag]) -> str | None:
    """Returns what is wrong with a flag's name."""
    if is_selection(path[:-1]):
        if not of_flag(flag.name, flag.value):
            option = ".".join([*map(str, path[:-1]), "NAME", flag.name.rpartition(".")[2]])
            return f"{flag.text}: give the plugin's name and the option: --{option}"
    elif _takes_names(path) or ((annotation := annotation_at(path)) is not None and not holds_sections(annotation)):
        return None
    chosen = [(each.keys[0], name) for each in flags if len(each.keys) == 1 for name in split_names(each.value or "")]
    return f"{flag.text}{what_is_meant(flag.name, flag.value, path, names, control, chosen)}"


def _takes_names(path: Path) -> bool:
    """Returns True if plugins or data sources are chosen there."""
    return path in DATA or is_choice(path) or is_selection(path)


def _value(path: Path, flags: Sequence[Flag], problems: Problems) -> Located | None:
    """Returns what the flag, perhaps repeated, sets."""
    last, annotation = flags[-1], annotation_at(path)
    if len(spellings := {flag.name.replace("-", "_"): flag.text for flag in flags}) > 1:
        problems.lines.append(f"{' and '.join(spellings.values())} set the same: leave one out")
        return None
    texts = [Alone("true") if flag.value is None else Text(flag.value) for flag in flags]
    if _takes_names(path):
        if not all(flag.value for flag in flags):
            problems.lines.append(f"{last.text} needs {'a path' if path in DATA else 'the name of a plugin'}")
            return None
        if is_choice(path):
            problems.notices += last_counts(last.text, texts)
            return canonical(Located(str(texts[-1]), last.text), path, problems)
        if path in DATA and texts == ["null"]:
            return Located({"sources": Located([], last.text)}, last.text)
        if path in DATA:
            items = [Located(str(text), f"{last.text} {text}") for text in texts]
        else:
            items = [Located(name, last.text) for text in texts for name in split_names(text)]
        return canonical(Located(items, last.text), path, problems)
    if last.value is None and not takes_bool(annotation):
        problems.lines.append(f"{last.text} needs a value")
        return None
    value: Any = Texts(texts) if len(texts) > 1 else texts[0]
    if annotation is not Any and not isinstance(value := coerce(annotation, value), list):
        problems.notices += last_counts(last.text, texts)
    return Located(value, last.text)


# --- from text to values ------------------------------------------------------------------------

_LISTS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Set)

_UNFIT = object()


class Text(str):
    """As typed: what it means depends on the type of the option."""


class Alone(Text):
    """The value of a flag that has none: true, if the option can be."""


class Texts(list[Text]):
    """The values of a flag given several times, where it is not known yet whether it takes a list."""


def last_counts(flag: str, values: Sequence[str]) -> Iterator[str]:
    """Yields what to say of a flag that takes one value, and was given several."""
    if len(set(values)) > 1:
        yield f"{flag} takes one value and is given {len(values)}, {' and '.join(values)}: the last one counts"


def takes_bool(annotation: Any) -> bool:
    return _read(annotation, True) is True


def coerce(annotation: Any, value: Any) -> Any:
    """Text from a flag, brought near ``annotation``, and texts in a mapping near its model; pydantic does the rest. Other values
    pass unchanged.

    Lists come from repetition, commas or JSON; mappings from JSON. ``null``, and ``none`` where it is no word of its own,
    is None.
    """
    if isinstance(value, dict) and (model := nested_model(annotation)) is not None:
        types = {key: field.annotation for key, field in fields_of(model).items()}
        return {key: coerce(types.get(key, Any), item) for key, item in value.items()}
    takes_list = any((get_origin(member) or member) in _LISTS for member in members(annotation))
    if isinstance(value, Texts):
        if takes_list:
            return [item for text in value for item in _items(text)]
        value = value[-1]
    if not isinstance(value, Text) or annotation is Any:
        return value
    text, parsed = str(value), _json(value)
    if text == "null" and _read(annotation, None) is None:
        return None
    if takes_list and "," in text:
        return _items(text)
    if _read(annotation, text) is not _UNFIT:
        return text
    if text == "none" and _read(annotation, None) is None:
        return None
    if isinstance(parsed, dict | list) or _read(annotation, parsed) is not _UNFIT:
        return parsed
    return _items(text) if takes_list else text


def _read(annotation: Any, value: Any) -> Any:
    """The value as the type reads it, or ``_UNFIT``."""
    try:
        return TypeAdapter(annotation).validate_python(value)
    except Exception:  # a type that pydantic cannot read either: its model knows how
        return _UNFIT


def _items(text: str) -> list[Any]:
    if text.startswith("["):
        parsed = _json(text)
        return parsed if isinstance(parsed, list) else [text]
    parts = text.split(",")
    return parts if any(parts) else [text] if text else []  # "," is an item itself


def _json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        return text


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(values := dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice")
    return values
