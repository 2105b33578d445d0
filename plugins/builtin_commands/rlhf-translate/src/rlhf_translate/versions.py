"""Other projects' options and defaults, version by version, and the recognition of a command's version.

The tables are written by ``scripts/foreign_options.py`` from the published packages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias

from rlhf_host import UserError
from rlhf_translate.in_code import IN_CODE


@cache
def _read(project: str) -> tuple[list[str], dict[str, dict[str, dict[str, Any]]]]:
    """Returns versions, and program → option → version from which its default is such; None from the version that lacks it."""
    table = json.loads((files("rlhf_translate") / "versions" / f"{project}.json").read_text(encoding="utf-8"))
    return table["versions"], table["programs"]


def versions(project: str) -> list[str]:
    return _read(project)[0]


@dataclass(frozen=True)
class Version:
    """Assumed version of a command."""

    number: str
    first: str
    """Earliest version that also has the command's options."""
    last: str
    by: tuple[str, ...] = ()
    """Options of the command that other versions lack."""
    foreign: tuple[str, ...] = ()
    """Options that this version lacks."""
    said: str = ""
    """The version that the reader gave."""

    @property
    def known(self) -> bool:
        """True if it is what the reader gave."""
        return f"{self.number}.".startswith(f"{self.said}.")

    @property
    def key(self) -> tuple[int, ...]:
        return number_of(self.number)


def number_of(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition(".post")[0])[:3])


Groups: TypeAlias = Sequence[tuple[str, str]]
"""Parts of a configuration that a command chose: the place of its options, and the part, as ``("optim", "optim=megatron")``."""


def groups_of(project: str) -> dict[str, list[str]]:
    """Returns the groups of which a command may choose a part → its parts."""
    groups: dict[str, list[str]] = {}
    for group, equals, part in (name.partition("=") for name in _read(project)[1]):
        if equals:
            groups.setdefault(group, []).append(part)
    return groups


def _options(project: str, program: str, groups: Groups = ()) -> Mapping[str, Mapping[str, Any]]:
    """Returns the options of a program, and those that only the chosen parts have."""
    programs = _read(project)[1]
    own = programs.get(program, {})
    parts = {f"{place}.{name}": known for place, part in groups for name, known in programs.get(part, {}).items()}
    return {**parts, **own} if parts else own


def recognise(
    project: str,
    program: str,
    names: Collection[str],
    said: str = "",
    added: Collection[str] = frozenset(),
    groups: Groups = (),
) -> Version:
    """Returns the newest version that has most of the options.

    Args:
        names: names of the command's options.
        said: version given by the reader, or the beginning of one.
        added: options that the version lacks, according to the command: ``+NAME=VALUE`` of hydra.
        groups: the parts that the command chose.
    """
    known, table = versions(project), _options(project, program, groups)
    present = {name: set(_having(table[name], known)) for name in names if name in table}
    if said:
        fitting = [version for version in known if f"{version}.".startswith(f"{said}.")] or [_nearest(known, said)]
    else:
        having = [version for version in known if any(version in _having(changes, known) for changes in table.values())]
        scores = {
            version: sum((version in where) != (name in added) for name, where in present.items())
            for version in having or known
        }
        fitting = [version for version in scores if scores[version] == max(scores.values())]
    number = fitting[-1]
    by = sorted(
        (name for name, where in present.items() if number in where and len(where) < len(known)),
        key=lambda name: len(present[name]),
    )
    foreign = [name for name in names if name not in table or number not in present[name]]
    return Version(number, fitting[0], number, tuple(by), tuple(foreign), said)


def _nearest(known: Sequence[str], said: str) -> str:
    """Returns the last version that is not newer."""
    before = [version for version in known if number_of(version) <= number_of(said)]
    return before[-1] if before else known[0]


def check(project: str, said: str) -> None:
    """Refuses text that is not a version."""
    if not re.fullmatch(r"\d+(\.\d+)*(\.?post\d+)?", said):
        raise UserError(f"--from {project}=={said}: not a version such as {versions(project)[-1]}")


def _having(changes: Mapping[str, Any], known: Sequence[str]) -> list[str]:
    """Returns the versions that have the option."""
    having, value = [], None
    for version in known:
        value = changes.get(version, value)
        having += [version] if value is not None else []
    return having


@cache
def _part_in(project: str, part: str, head: str) -> Collection[str]:
    """Returns the versions in which a part says what options are: all of an optimizer or engine, or a role's with this head."""
    options = _read(project)[1][part]
    own = [known for name, known in options.items() if part.startswith(("optim=", "engine=")) or name.partition(".")[0] == head]
    return {version for known in own for version in _having(known, versions(project))}


def default_of(project: str, program: str, name: str, version: str, groups: Groups = ()) -> tuple[str, ...] | None:
    """Returns the option's default in a version, or its behaviour without such an option; None if neither is known. Where a part
    was chosen, it is the part's.
    """
    known, programs = _read(project)
    in_code = IN_CODE[project].get(program, {}).get(name, {})
    changes: Mapping[str, Any] = {**in_code, **programs.get(program, {}).get(name, {})}
    for place, part in groups:
        inner = name.removeprefix(f"{place}.")
        if inner != name and version in _part_in(project, part, inner.partition(".")[0]):
            changes = programs[part].get(inner, {})
    value: Any = None
    for each in known[: known.index(version) + 1]:
        value = changes.get(each, value)
    return None if value is None else tuple(value) if isinstance(value, list) else (value,)


def options_of(project: str, program: str, groups: Groups = ()) -> Collection[str]:
    """Returns the options of all versions."""
    return _options(project, program, groups).keys()


def spans(project: str, program: str, name: str, groups: Groups = ()) -> str:
    """Returns ``0.9.3 to 0.10.1``: the versions that have an option; empty: none."""
    having = _having(_options(project, program, groups).get(name, {}), versions(project))
    return "" if not having else having[0] if len(having) == 1 else f"{having[0]} to {having[-1]}"


def differing(project: str, program: str, name: str, version: Version, groups: Groups = ()) -> dict[str, tuple[str, ...]]:
    """Returns the defaults of an option in the versions that fit, if they differ: from which version → value."""
    known = versions(project)
    fitting = known[known.index(version.first) : known.index(version.last) + 1]
    values: dict[str, tuple[str, ...]] = {}
    for each in fitting:
        value = default_of(project, program, name, each, groups)
        if value is not None and value != next(reversed(values.values()), None):
            values[each] = value
    return values if len(values) > 1 else {}
