"""A translation as a configuration file, each setting with the options it comes from."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_host.commands import visible
from rlhf_host.settings import write_yaml
from rlhf_translate.elsewhere import key_of
from rlhf_translate.in_code import IN_CODE
from rlhf_translate.notes import Note
from rlhf_translate.programs import PROJECTS
from rlhf_translate.translation import Translation
from rlhf_translate.versions import differing, spans, versions

WIDTH = 120
SHORT = 60
"""Maximum length of a remark that is repeated; a longer one is written once."""
UNSET = "SET THIS"
"""Text in place of a value that the reader must give."""
_GLUE = "\N{NO-BREAK SPACE}"
"""Character that keeps an option and its line together."""
_DEFAULT = "default there: "
_SHOWN = 3
"""Maximum number of names in a sentence."""


def file_text(translation: Translation, source: str) -> str:
    """Returns the file. Decisions to make, and options without a setting, are comments before the first setting.

    Args:
        source: the file it was translated from.
    """
    command = translation.command
    title = PROJECTS[command.project]
    lines = [f"# From {visible(source)}:{command.line}, a command of {command.about}."]
    lines += [line for text in version_lines(translation) for line in _comment(text, "# ")]
    lines += [line for text in to_do(translation) for line in _comment(text, "# ")]
    groups = {
        "Options without a counterpart here:": [note for note in translation.of_options if note.lost],
        "Options that need no setting here:": [note for note in translation.of_options if note.needs_none],
        f"Defaults of {title} without a counterpart here:": [note for note in translation.of_defaults if note.lost],
    }
    for head, notes in groups.items():
        if notes:
            lines += ["#", f"# {head}", *(line for note in notes for line in _comment(described(note), "#   "))]
    return "\n".join([*lines, "", *_Sections(translation).lines(), ""])


def version_lines(translation: Translation) -> Iterator[str]:
    """Yields lines about the assumed version of the command, the reasons, and differences in other versions."""
    command, version = translation.command, translation.version
    title = PROJECTS[command.project]
    if version.said and version.known:
        yield f"Version: {title} {version.number}, as --from says."
    elif version.said:
        first, *_, last = versions(command.project)
        why = f"{version.said} of --from is not known here; known are {first} to {last}"
        yield f"Version: read as {title} {version.number}: {why}."
    else:
        all_ = f"{title} {version.number}"
        if version.first != version.number:
            all_ = f"{title} {version.first} to {version.number} have these options; taken is {version.number}"
        why = f", by {_some(version.by)}" if version.by else ""
        yield f"Version: {all_}{why} (another: --from {command.project}:{command.method}==VERSION)."
    in_code = IN_CODE[command.project].get(command.method, {})
    names = [
        name for note in translation.of_defaults if (name := _theirs(note, command.project)) in in_code or not note.needs_none
    ]
    known = {name: differing(command.project, command.method, name, version, command.groups) for name in names}
    if differ := [f"{name} ({', '.join(_since(values))})" for name, values in known.items() if len(values) > 1]:
        yield f"Defaults that differ in these versions: {', '.join(differ)}."
    foreign = [name for name in version.foreign if spans(command.project, command.method, name, command.groups)]
    if foreign and command.project != "verl":
        yield f"{title} {version.number} has no {_some(foreign)}; read as in {spans(command.project, command.method, foreign[0])}."


def _theirs(note: Note, project: str) -> str:
    return key_of(note.option.name) if project != "verl" else note.option.name


def _since(values: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for number, (version, value) in enumerate(values.items()):
        yield f"{' '.join(value)} {'from' if number else 'in'} {version}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def to_do(translation: Translation) -> list[str]:
    """Returns what the reader must do before training."""
    lines = []
    for key, notes in translation.asked.items():
        notes = [note for note in notes if note.option.line] or notes
        said = dict.fromkeys(note.outcome.remark for note in notes)
        remarks = [remark for remark in said if not any(remark in other for other in said if other != remark)]
        lines.append(f"{key}: {UNSET} ({'; '.join(remarks)}): {', '.join(dict.fromkeys(map(_option, notes)))}")
    for note in translation.questions:
        if not note.outcome.asks:
            lines.append(f"{UNSET} ({note.outcome.remark}): {_option(note)}")
    lines += [f"--dry-run refuses this file until you decide: {line}" for line in translation.refusals]
    return [visible(line) for line in [*lines, *translation.command.notes]]


def described(note: Note) -> str:
    """Returns the outcome of an option, on one line."""
    text = _option(note).removeprefix(_DEFAULT)
    return visible(f"{text}: {'; '.join(note.unfit) or note.outcome.remark}")


def _option(note: Note) -> str:
    if note.option.name == "processes":
        if note.option.line:
            return f"number of processes ({note.option.place})"
        return note.option.shown or "one process"
    return f"{note.option.text} ({note.option.place})" if note.option.line else f"{_DEFAULT}{note.option.text}"


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


class _Sections:
    def __init__(self, translation: Translation):
        self.asked = translation.asked
        self.settings = dict.fromkeys((key for key in self.asked), UNSET) | translation.settings
        self.causes = {**translation.causes, **self.asked}
        self.first: dict[str, str] = {}
        """Long remark → the key that has it."""

    def lines(self, settings: Mapping[str, Any] | None = None, above: str = "") -> Iterator[str]:
        """Yields keys in the order of their first option; values under one key stay together."""
        settings = self.settings if settings is None else settings
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
        names = ", ".join(dict.fromkeys(visible(_option(note)).replace(" ", _GLUE) for note in written or notes[:1]))
        if path in self.asked:
            return f"{UNSET}: {names}" if path not in self.settings or self.settings[path] != UNSET else names
        told = [note for note in written or notes if note.outcome.remark and not note.asks]
        remarks = dict.fromkeys(note.outcome.remark for note in told)
        text = f"{names}: {visible('; '.join(remarks))}" if remarks else names
        if len(text) > SHORT and (first := self.first.setdefault(text, path)) != path:
            text = f"see {first}"
        return text


def _value(value: Any) -> str:
    """Returns the value on one line."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str) and (len(value) > 80 or set(value) & set("[]{},#\n")):
        return json.dumps(value, ensure_ascii=False)
    return write_yaml({"key": value}).removeprefix("key:").strip()


def _key(name: str) -> str:
    return write_yaml({name: 0}).rpartition(":")[0]
