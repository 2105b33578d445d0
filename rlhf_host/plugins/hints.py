"""Hints for somebody who typed a name that nothing here has: the answers of packages.

A package answers with an entry point in the group ``rlhf.hints``: a callable that takes an ``UnknownName`` and returns
``; OpenRLHF's --pretrain is --actor.model here``, or an empty text. It is imported when a name is unknown, and not before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rlhf_host.errors import asks_to_stop
from rlhf_host.plugins.discovery import unchosen

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnknownName:
    """A name that was typed, and that nothing here has."""

    what: Literal["flag", "option", "section", "choice", "command", "object"]
    """``flag``: a flag, or a key of a file. ``option``: one that the chosen plugin does not have, ``algo.beta``. ``section``: of a
    file. ``choice``: in the place of a plugin's name. ``command``: in the place of a command's name. ``object``: an argument, or a
    kind of plugins, that got a Python object of another project."""
    name: str
    """Name as typed, without dashes in front: words of flags are joined by dashes or underscores. Of a command with its group in
    front: ``plugins.ls``."""
    value: object = None
    """The value of a flag or key, where one was given."""
    fits: Callable[[str], bool] = bool
    """Returns True if the run could have the flags of a hint, ``--algo.clip-eps``."""


def of_flag(name: str, value: object = None, fits: Callable[[str], bool] = bool) -> str:
    """Returns a hint for a flag or a key, ``; ...``, or nothing; ``fits`` as in ``UnknownName``."""
    return of_packages(UnknownName("flag", name.lstrip("-+"), value, fits))


def of_object(name: str, value: object) -> str:
    """The same for a Python object, given as the argument or the plugin ``name``."""
    plain = value is None or isinstance(value, str | int | float | list | tuple | dict)
    return "" if plain else of_packages(UnknownName("object", name, value))


def of_place(place: str, value: object) -> str:
    """The same for a place that messages name, and what was set there, perhaps in sections."""
    while isinstance(value, dict):
        value = next(iter(value.values()), None)
    return of_flag(place.rpartition(": ")[2], value)


def of_nobody(what: str = "names of other projects are explained", kind: Literal["hint", "reward_form"] = "hint") -> str:
    """Returns what to install for it, where nothing of the kind is installed: ``; ...``, or nothing."""
    from rlhf_host.plugins.catalogue import offered
    from rlhf_host.plugins.recommended import recommended

    offer = None if unchosen(kind) else offered()["command"].get(recommended("command", "foreign"))
    return f"; {what} after {offer.line}" if offer else ""


def of_packages(unknown: UnknownName) -> str:
    """Returns the first answer, ``; ...``, or nothing. A package that fails gives none: the message about the name is worth more
    than its hint."""
    from rlhf_host.plugins.selection import imported  # which asks for hints itself

    for info in unchosen("hint"):
        try:
            answer = imported(info)(unknown)
        except BaseException as error:
            if asks_to_stop(error):
                raise
            log.debug("%s gives no hint for %s", info, unknown.name, exc_info=True)
            continue
        if isinstance(answer, str) and answer:
            return answer
    return ""
