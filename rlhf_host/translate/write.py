"""A translation as a configuration file, each setting with the options it comes from."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_host.config.yaml_file import write_yaml
from rlhf_host.errors import visible
from rlhf_host.translate.commands import PROJECTS
from rlhf_host.translate.translation import Note, Translation

WIDTH = 120
SHORT = 60
"""A longer remark is written once."""
_GLUE = "\N{NO-BREAK SPACE}"
"""Keeps an option and its line together."""
_DEFAULT = "default there: "


def file_text(translation: Translation, source: str) -> str:
    """The file. Options without a setting are comments before the first one.

    Args:
        source: the file it was translated from.
    """
    command = translation.command
    title = PROJECTS[command.project]
    lines = [f"# From {visible(source)}:{command.line}, a command of {command.about}."]
    lines += [f"# {text}" for text in to_do(translation)]
    groups = {
        "Options without a counterpart here:": [note for note in translation.of_options if note.lost],
        "Options that need no setting here:": [note for note in translation.of_options if note.needs_none],
        f"Defaults of {title} without a counterpart here:": [note for note in translation.of_defaults if note.lost],
    }
    for head, notes in groups.items():
        if others := [note for note in notes if not note.outcome.todo]:
            lines += ["#", f"# {head}", *(line for note in others for line in _comment(described(note), "#   "))]
    return "\n".join([*lines, "", *_Sections(translation).lines(translation.settings), ""])


def to_do(translation: Translation) -> list[str]:
    """What the reader must do before training."""
    lines = [f"{note.outcome.todo}: SET THIS ({note.outcome.remark}): {_option(note)}" for note in translation.todo]
    for text, line in translation.command.unset.items():
        if text == "$@":
            lines.append(f"$@ (line {line}): arguments of the script itself are not known: add them")
        else:
            lines.append(f"{text} has no value in the file (line {line}): replace it")
    return [visible(line) for line in lines]


def described(note: Note) -> str:
    """What became of an option, on one line."""
    text = _option(note).removeprefix(_DEFAULT)
    return visible(f"{text}: {'; '.join(note.unfit) or note.outcome.remark}")


def _option(note: Note) -> str:
    return f"{note.option.text} ({note.option.place})" if note.option.line else f"{_DEFAULT}{note.option.text}"


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False
    )


class _Sections:
    def __init__(self, translation: Translation):
        self.causes = translation.causes
        self.first: dict[str, str] = {}
        """Long remark → the key that has it."""

    def lines(self, settings: Mapping[str, Any], above: str = "") -> Iterator[str]:
        """Keys in the order of their first option; what is under one key stays together."""
        indent = "  " * above.count(".")
        for head in dict.fromkeys(path.partition(".")[0] for path in settings):
            inner = {path.partition(".")[2]: value for path, value in settings.items() if path.partition(".")[0] == head}
            if "" in inner:
                line, cause = f"{indent}{_key(head)}: {_value(inner[''])}", self.cause(above + head)
                short = len(line) + len(cause) + 4 <= WIDTH
                lines = [f"{line}  # {cause}"] if short else [*_comment(cause, f"{indent}# "), line]
                yield from (text.replace(_GLUE, " ") for text in lines)
            else:
                yield f"{indent}{_key(head)}:"
                yield from self.lines(inner, f"{above}{head}.")

    def cause(self, path: str) -> str:
        notes = self.causes[path]
        written = [note for note in notes if note.option.line]
        names = ", ".join(visible(_option(note)).replace(" ", _GLUE) for note in written or notes[:1])
        remarks = dict.fromkeys(note.outcome.remark for note in written or notes if note.outcome.remark)
        text = f"{names}: {visible('; '.join(remarks))}" if remarks else names
        if len(text) > SHORT and (first := self.first.setdefault(text, path)) != path:
            text = f"see {first}"
        return text


def _value(value: Any) -> str:
    """On one line."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str) and (len(value) > 80 or set(value) & set("[]{},#\n")):
        return json.dumps(value, ensure_ascii=False)
    return write_yaml({"key": value}).removeprefix("key:").strip()


def _key(name: str) -> str:
    return write_yaml({name: 0}).rpartition(":")[0]
