"""Reasons for which an option that is in no table of the page needs no setting, or has no counterpart."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from types import ModuleType

from rlhf_translate.openrlhf import names as of_openrlhf
from rlhf_translate.options import NONE, OFF, Option, Outcome, lost, same
from rlhf_translate.page import is_nothing
from rlhf_translate.programs import PROJECTS, Command
from rlhf_translate.trl import names as of_trl
from rlhf_translate.verl import names as of_verl
from rlhf_translate.verl.groups import backend_of
from rlhf_translate.versions import default_of, options_of, spans, versions

_NAMES: Mapping[str, ModuleType] = {"openrlhf": of_openrlhf, "trl": of_trl, "verl": of_verl}


def by_reason(command: Command, option: Option, names: Sequence[str], of_launcher: bool) -> Outcome:
    """Returns what the project's own lists tell.

    Args:
        names: the option's written name and its newest one.
        of_launcher: True for an option of what starts the program.
    """
    project, own = command.project, _NAMES[command.project]
    if option.name.startswith("~"):
        return lost(f"takes {option.name[1:]} out of the configuration of verl; its default there is not taken either")
    if (reason := _find(own.NEEDLESS, names)) is not None:
        return same(reason)
    off = not option.missing and bool(option.values) and is_nothing(option) and not _is_free(names)
    if (reason := _find(own.MISSING, names)) is not None:
        return same("off, as it is here") if off else lost(reason)
    title = PROJECTS[project]
    for place, part in command.groups:
        if option.name.startswith(f"{place}.") and backend_of(part):
            return same("off, as it is here") if off else lost(f"an option of {backend_of(part)}, which is not here")
    if project == "trl" and any(name in options_of("trl", "accelerate") for name in names):
        return lost("nothing here does what this option of accelerate does")
    if of_launcher:
        return lost("an option of what starts the program: keep it where you start rlhf train")
    if off and any(_is_off_there(command, name) for name in names):
        return same("off, as it is there by default")
    if span := next(filter(None, (spans(project, command.method, name, command.groups) for name in names)), ""):
        return lost(f"nothing here does what this option of {title} {span} does")
    return lost(f"not an option of {title} {versions(project)[0]} to {versions(project)[-1]}, and not known here")


_FREE = ("*reward_kwargs.*", "*.engine_kwargs.*", "*.override_config.*")
"""Names that code of the user, of an engine or of a model reads: a value of nothing there is a value."""


def _is_free(names: Sequence[str]) -> bool:
    """Returns True for a name beneath those; a dropout of 0, and devices of 1, are nothing wherever they are."""
    free = any(fnmatch.fnmatchcase(name, pattern) for pattern in _FREE for name in names)
    return free and not names[0].endswith(("dropout", "pdrop", "_parallel_size"))


def _is_off_there(command: Command, name: str) -> bool:
    """Returns True if the newest version has the option, off by default."""
    newest = versions(command.project)[-1]
    default = default_of(command.project, command.method, name, newest, command.groups)
    return default is not None and " ".join(default).lower() in (*OFF, *NONE, "0.0")


def _find(reasons: Mapping[str, str], names: Sequence[str]) -> str | None:
    for reason, patterns in reasons.items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split() for name in names):
            return reason
    return None
