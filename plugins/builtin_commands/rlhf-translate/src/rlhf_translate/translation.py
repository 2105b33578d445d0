"""Translation of another project's command to our configuration, with a note on each of its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_host.settings import MANY, Names
from rlhf_translate.notes import Note, notes_of
from rlhf_translate.options import PROCESSES, PROGRAM, Option, Outcome, nowhere
from rlhf_translate.programs import Command
from rlhf_translate.projects import read
from rlhf_translate.validation import Trial, load, refusals
from rlhf_translate.versions import Version

_NO_SUCH = ("has no option", "no such key", "is chosen; add --")
"""Text in messages about settings that nobody could set."""


@dataclass
class Translation:
    command: Command
    version: Version
    notes: list[Note]
    """Notes on every option, then on defaults."""
    settings: dict[str, Any]
    """Key with dots → value, as in a configuration file."""
    causes: dict[str, list[Note]]
    """Key with dots → notes on the options it comes from."""
    refusals: list[str]
    """Reasons for which a run with these settings would be refused, whatever the model and the data."""

    @property
    def of_options(self) -> list[Note]:
        return [note for note in self.notes if note.option.line and note.name not in (PROGRAM, PROCESSES)]

    @property
    def questions(self) -> list[Note]:
        """Notes on what the reader must set, written or not."""
        return [note for note in self.notes if note.asks]

    @property
    def asked(self) -> dict[str, list[Note]]:
        """Keys that have no value → notes on the options that should give it."""
        keys: dict[str, list[Note]] = {}
        for note in self.questions:
            for key in note.outcome.asks or ():
                keys.setdefault(key, []).append(note)
        return keys

    @property
    def of_defaults(self) -> list[Note]:
        return [note for note in self.notes if not note.option.line]


def translate(command: Command, file: str) -> Translation:
    """Returns the command as a configuration.

    Args:
        file: its name, for messages.

    Raises:
        UserError: a plugin that it needs is not installed.
    """
    reading = read(command)
    refused: dict[Option, str] = {}
    unfit: dict[str, str] = {}
    while True:
        notes = list(notes_of(command, reading, refused))
        draft = _Draft(notes, unfit, file)
        trial = draft.tried()
        if not draft.take_out(trial, refused, unfit):
            break
    draft.leave_our_defaults_out(trial)
    typed = {path: _typed(path, value, trial.values or draft.alone(path)) for path, value in draft.settings.items()}
    asked = [key for note in notes if note.outcome.asks for key in note.outcome.asks]
    return Translation(command, reading.version, notes, typed, draft.causes, refusals(trial, asked))


class _Draft:
    """Settings from all options together."""

    def __init__(self, notes: Sequence[Note], unfit: Mapping[str, str], file: str):
        self.file = file
        self.settings: dict[str, Any] = {}
        self.causes: dict[str, list[Note]] = {}
        self.stand_ins: dict[str, Any] = {}
        """Stand-ins for missing values, with which the rest can be tried."""
        asked = {key for note in notes for key in note.outcome.asks or () if key not in note.outcome.settings}
        for note in notes:
            note.unfit = [f"{path}: {unfit[path]}" for path in note.outcome.settings if path in unfit]
            for path, value in note.outcome.settings.items():
                if path not in unfit and path not in asked:
                    self._add(path, value, note)
        for note in notes:
            for path, value in note.outcome.stand_ins.items():
                if path not in self.settings and path not in unfit:
                    self.stand_ins.setdefault(path, value)

    def _add(self, path: str, value: Any, note: Note) -> None:
        """Adds an option; one that was written overrides defaults."""
        if note.option.line or path not in self.settings:
            self.settings[path] = value
        if self.settings[path] == value:
            self.causes.setdefault(path, []).append(note)

    def place(self, path: str) -> str:
        """Returns the place, for messages."""
        if path not in self.causes:
            return path
        option = self.causes[path][0].option
        return f"{option.file or self.file}:{option.line}: {option.text}: {path}"

    def tried(self, settings: Mapping[str, Any] | None = None) -> Trial:
        settings = self.settings if settings is None else settings
        return load({**settings, **self.stand_ins}, {path: self.place(path) for path in (*settings, *self.stand_ins)})

    def alone(self, path: str) -> Mapping[str, Any]:
        """Returns the configuration with one setting, and the plugin that it is an option of: the whole one is not valid."""
        plugins = {f"{path[: place + 1]}name" for place, letter in enumerate(path) if letter == "."}
        chosen = {name: value for name, value in {**self.stand_ins, **self.settings}.items() if name in plugins}
        return load({**chosen, path: self.settings[path]}, {name: self.place(name) for name in (*chosen, path)}).values

    def take_out(self, trial: Trial, refused: dict[Option, str], unfit: dict[str, str]) -> bool:
        """Notes which settings are invalid; returns True if there was one. A setting that nobody could set has no counterpart;
        otherwise the value is refused, with everything that follows from it.
        """
        found = False
        for path, message in trial.errors:
            if path is None or path.endswith(".name"):
                continue
            options = [note.option for note in self.causes.get(path, []) if not note.option.refused]
            found = True
            options = [option for option in options if option.missing] or options
            if not options or any(text in message for text in _NO_SUCH):
                unfit[path] = message
            else:
                refused |= {option: nowhere(option.missing) if option.missing else f"{path}: {message}" for option in options}
        return found

    def leave_our_defaults_out(self, trial: Trial) -> None:
        """Leaves out settings that nobody wrote and that are the same here by default."""
        defaults = [path for path in self.settings if self._only_default(path)]
        base = self.tried({path: value for path, value in self.settings.items() if path not in defaults})
        for path in defaults:
            if trial.values and base.values and _at(trial.values, path) == _at(base.values, path):
                for note in self.causes.pop(path):
                    note.outcome = replace(note.outcome, settings=_without(path, note.outcome))
                del self.settings[path]

    def _only_default(self, path: str) -> bool:
        """Returns True if nobody wrote it, and the configuration is valid without it too: a plugin may require its options."""
        head = path.partition(".")[0]
        chooses = head in MANY or Names().place(head)[1] is not None or path.endswith((".name", ".sources"))
        return not chooses and not any(note.option.line for note in self.causes[path])


def _without(path: str, outcome: Outcome) -> dict[str, Any]:
    return {name: value for name, value in outcome.settings.items() if name != path}


def _at(config: Mapping[str, Any], path: str) -> Any:
    """Returns the value of a file's key in the whole configuration."""
    head, *rest = path.split(".")
    place, _ = Names().place(head)
    value: Any = config
    for part in (*place, *rest):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _typed(path: str, value: Any, config: Mapping[str, Any]) -> Any:
    """Returns the value in the configuration's type, a number for its text."""
    known = _at(config, path)
    if not isinstance(value, str) or path.endswith(".name") or (known is None and value.lower() not in ("none", "null")):
        return value
    return list(known) if isinstance(known, tuple) else known
