"""From a command of another project to a configuration of ours that loads, with a note on each of its options."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_host.config.choices import complete
from rlhf_host.config.flags import Text
from rlhf_host.config.load import read_config
from rlhf_host.config.tree import MANY, Names
from rlhf_host.config.yaml_file import Located
from rlhf_host.errors import UserError
from rlhf_host.translate import openrlhf, trl, verl
from rlhf_host.translate.commands import PROJECTS, Command
from rlhf_host.translate.options import NONE, PROGRAM, Defaults, Given, Option, Outcome, Table, lost, without_secret
from rlhf_host.translate.page import by_page, newest


@dataclass(frozen=True, slots=True)
class Project:
    """What is known of another project beside the names."""

    convert: Callable[[str], Table]
    """Of a method: options whose value or meaning is not the same here."""
    defaults: Callable[[str], Defaults]
    """Of a method."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of earlier versions that mean the same, beside those of the tables."""
    read: Callable[[Sequence[Option]], list[Option]] = list
    """Options with their references to each other resolved."""


KNOWN = {
    "openrlhf": Project(openrlhf.convert, openrlhf.defaults, openrlhf.ALIASES),
    "trl": Project(trl.convert, trl.defaults, read=trl.resolved),
    "verl": Project(verl.convert, verl.defaults, verl.ALIASES, verl.resolved),
}


@dataclass
class Note:
    """What became of one option."""

    option: Option
    outcome: Outcome
    unfit: list[str] = field(default_factory=list)
    """Settings of it that cannot be, with the reason."""

    @property
    def lost(self) -> bool:
        return self.outcome.lost or bool(self.unfit)

    @property
    def needs_none(self) -> bool:
        return not self.lost and not self.outcome.settings


@dataclass
class Translation:
    command: Command
    notes: list[Note]
    """Of every option, then of defaults."""
    settings: dict[str, Any]
    """Key with dots → value, as a configuration file has them."""
    causes: dict[str, list[Note]]
    """Key with dots → notes on the options it comes from."""

    @property
    def of_options(self) -> list[Note]:
        return [note for note in self.notes if note.option.line and note.option.name != self.command.program]

    @property
    def todo(self) -> list[Note]:
        """On keys that the reader must set, written or not."""
        return [note for note in self.notes if note.outcome.todo]

    @property
    def of_defaults(self) -> list[Note]:
        return [note for note in self.notes if not note.option.line]


def translate(command: Command, file: str) -> Translation:
    """The command as a configuration.

    Args:
        file: its name, for messages.

    Raises:
        UserError: a plugin that it needs is not installed.
    """
    notes = list(_notes(command))
    while True:
        settings, causes = _gather(notes)
        try:
            full = _load(settings, causes, file)
            break
        except UserError as error:
            if not _take_out(notes, causes, str(error), file):
                raise
    base: dict[str, Any] = {}
    with contextlib.suppress(UserError):  # where something needs a value that is the other project's default, all of these stay
        base = _load({path: value for path, value in settings.items() if not _only_default(path, causes)}, causes, file)
    for path in [path for path in settings if _only_default(path, causes) and _at(full, path) == _at(base, path)]:
        for note in causes.pop(path):
            note.outcome = replace(note.outcome, settings=_without(path, note.outcome))
        del settings[path]
    typed = {path: _typed(path, value, full) for path, value in settings.items()}
    return Translation(command, notes, typed, causes)


def _notes(command: Command) -> Iterator[Note]:
    known, title = KNOWN[command.project], PROJECTS[command.project]
    options = [without_secret(option) for option in known.read([*command.options, *command.launch])]
    named = [(_name(known, title, option), option) for option in options]
    named.insert(0, (PROGRAM, Option(command.program, (), command.line)))
    defaults = [(name, _default(command, name, values)) for name, values in known.defaults(command.method).items()]
    given = Given(command.method, [*defaults, *named])
    last = {name: option for name, option in named}
    table = known.convert(command.method)
    for name, option in [*named, *(item for item in defaults if item[0] not in last)]:
        if last.get(name, option) is not option:
            yield Note(option, lost(f"set again ({last[name].place}), which counts"))
            continue
        if (convert := table.get(name)) is not None:
            try:
                yield Note(option, convert(option, given))
            except ValueError:
                yield Note(option, lost("the value cannot be read"))
        elif name != PROGRAM:
            yield Note(option, by_page(title, option, name))


def _name(known: Project, title: str, option: Option) -> str:
    """The newest one. An option of an old name that has no value does not stand for the new one."""
    name = newest(title, option.name)
    return name if option.value.lower() in NONE[:-1] else known.aliases.get(name, name)


def _default(command: Command, name: str, values: tuple[str, ...]) -> Option:
    return Option(name, values, sign="=") if command.project == "verl" else Option(f"--{name}", values)


def _gather(notes: Sequence[Note]) -> tuple[dict[str, Any], dict[str, list[Note]]]:
    """What all options set together. An option that was written overrides defaults."""
    settings: dict[str, Any] = {}
    causes: dict[str, list[Note]] = {}
    for note in notes:
        for path, value in note.outcome.settings.items():
            if note.option.line or path not in settings:
                settings[path] = value
            if settings[path] == value:
                causes.setdefault(path, []).append(note)
    return settings, causes


def _only_default(path: str, causes: Mapping[str, Sequence[Note]]) -> bool:
    """Whether nobody wrote it, and the configuration is one without it too: a plugin may require its options."""
    head = path.partition(".")[0]
    chooses = head in MANY or Names().place(head)[1] is not None or path.endswith((".name", ".sources"))
    return not chooses and not any(note.option.line for note in causes[path])


def _load(settings: Mapping[str, Any], causes: Mapping[str, Sequence[Note]], file: str) -> dict[str, Any]:
    """The whole configuration with these settings."""
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        *sections, last = path.split(".")
        inner = tree
        for part in sections:
            inner = inner.setdefault(part, {})
        inner[last] = Located(_located(value), _place(path, causes, file))
    loaded = read_config(settings=_sections(tree), quickstart=False)
    return complete(loaded.config, loaded.origins).model_dump()


def _place(path: str, causes: Mapping[str, Sequence[Note]], file: str) -> str:
    option = causes[path][0].option
    return f"{option.file or file}:{option.line}: {option.text}: {path}"


def _located(value: Any) -> Any:
    if isinstance(value, list):
        return [Located(_located(item), "") for item in value]
    if isinstance(value, dict):
        return {key: Located(_located(item), "") for key, item in value.items()}
    return Text(value) if isinstance(value, str) else value


def _sections(tree: Any) -> Located:
    """Nested mappings, each at the place of the plugin's name, or of its first value."""
    if isinstance(tree, Located):
        return tree
    values = {key: _sections(value) for key, value in tree.items()}
    return Located(values, values.get("name", next(iter(values.values()), Located(None, ""))).where)


def _take_out(notes: Sequence[Note], causes: Mapping[str, Sequence[Note]], message: str, file: str) -> bool:
    """Take settings out that cannot be, and say so; whether there was one. A plugin that is not installed stays."""
    found = False
    for path, own in ((path, own) for path, own in causes.items() if not path.endswith(".name")):
        place = f"{_place(path, causes, file)}: "
        for line in message.splitlines():
            if line.startswith(place):
                found = True
                for note in own:
                    note.outcome = replace(note.outcome, settings=_without(path, note.outcome))
                    note.unfit.append(f"{path}: {line.removeprefix(place)}")
    return found


def _without(path: str, outcome: Outcome) -> dict[str, Any]:
    return {name: value for name, value in outcome.settings.items() if name != path}


def _at(config: Mapping[str, Any], path: str) -> Any:
    """The value of a key of a file in the whole configuration."""
    head, *rest = path.split(".")
    place, _ = Names().place(head)
    value: Any = config
    for part in (*place, *rest):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _typed(path: str, value: Any, config: Mapping[str, Any]) -> Any:
    """The value as the configuration has it, a number for its text."""
    known = _at(config, path)
    if not isinstance(value, str) or path.endswith(".name") or (known is None and value.lower() not in ("none", "null")):
        return value
    return list(known) if isinstance(known, tuple) else known
