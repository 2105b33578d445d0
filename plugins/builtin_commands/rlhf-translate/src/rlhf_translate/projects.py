"""Knowledge about each other project beside the names in ``docs/reference/names.md``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_translate import openrlhf, trl, verl
from rlhf_translate.commands import PROJECTS, Command
from rlhf_translate.credentials import without_secret
from rlhf_translate.elsewhere import key_of
from rlhf_translate.options import PROCESSES, PROGRAM, Given, Option, Table
from rlhf_translate.page import newest
from rlhf_translate.verl import groups
from rlhf_translate.versions import Groups, Version, default_of, options_of, recognise


@dataclass(frozen=True, slots=True)
class Project:
    convert: Callable[[str], Table]
    """Method → options whose value or meaning is not the same here."""
    matters: Callable[[str], Sequence[str]]
    """Method → options, by their newest names, whose defaults matter here if they are not set."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of earlier versions with the same meaning, beside those of the tables."""
    read: Callable[[Sequence[Option], Mapping[str, tuple[str, ...]]], list[Option]] = lambda options, defaults: list(options)
    """Resolves references of options to each other, and to defaults."""
    groups: Callable[[str, Sequence[Option]], Groups] = lambda method, options: ()
    """Parts of the project's configuration that a command chose."""


KNOWN = {
    "openrlhf": Project(openrlhf.convert, openrlhf.matters, openrlhf.ALIASES),
    "trl": Project(trl.convert, trl.matters, read=trl.resolved),
    "verl": Project(verl.convert, verl.matters, verl.ALIASES, verl.resolved, groups.chosen),
}


@dataclass
class Reading:
    """A command's options under their newest names."""

    version: Version
    options: list[tuple[str, Option]]
    """Options as in the command."""
    defaults: list[tuple[str, Option]]
    table: Table
    launch: frozenset[Option] = frozenset()
    """Options of the launcher."""

    def given(self, method: str) -> Given:
        return Given(method, [*self.defaults, *self.options], self.version.key)


def read(command: Command) -> Reading:
    project, title = KNOWN[command.project], PROJECTS[command.project]
    own = {key_of(option.name): None for option in command.options}
    groups = command.groups = project.groups(command.method, command.options)
    version = recognise(command.project, command.method, own, command.version, command.added, groups)
    defaults = {
        name: values
        for name in options_of(command.project, command.method, groups)
        if (values := default_of(command.project, command.method, name, version.number, groups)) is not None
    }
    launch = [without_secret(option) for option in command.launch]
    options = [*(without_secret(option) for option in project.read(command.options, defaults)), *launch]
    also_own = {*options_of("trl", "accelerate")} & {*options_of(command.project, command.method)}
    named = [
        (f"launch.{name}" if option in launch and name in also_own else name, option)
        for name, option in ((_name(project, title, option), option) for option in options)
    ]
    program = Option(command.program, (), command.line)
    removed = {option.name.removeprefix("~") for option in command.options if option.name.startswith("~")}
    known = {
        _newest(project, title, name): _default(command, name, values)
        for name, values in defaults.items()
        if name not in removed
    }
    usual = [(name, known[name]) for name in project.matters(command.method) if name in known]
    return Reading(
        version,
        [(PROGRAM, program), (PROCESSES, command.processes), *named],
        usual,
        project.convert(command.method),
        frozenset(launch),
    )


def _newest(project: Project, title: str, name: str) -> str:
    name = newest(title, name)
    return project.aliases.get(name, name)


def _name(project: Project, title: str, option: Option) -> str:
    """Returns the newest name. An option of an old name without value does not replace the new one."""
    name = newest(title, option.name)
    off = not option.missing and " ".join(option.values).lower() in ("none", "null", "~")
    return name if off else project.aliases.get(name, name)


def _default(command: Command, name: str, values: tuple[str, ...]) -> Option:
    """Returns the default, under the option's name in that version."""
    if command.project != "verl":
        return Option(f"--{name}", values)
    return Option(name, values, sign="=", missing=(verl.ASKED,) if values == ("???",) else ())
