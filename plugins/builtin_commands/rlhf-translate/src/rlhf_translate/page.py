"""Options with the same value here: the tables of ``docs/reference/names.md`` have their names."""

from __future__ import annotations

import re
from typing import Any

from rlhf_host.settings import MANY, SINGLE
from rlhf_translate.elsewhere import Name, key_of, names
from rlhf_translate.options import NONE, Option, Outcome, Unknown, lost, same, to

NEEDLESS, MISSING = "Not needed here", "Not here yet"
"""Tables of names without a flag."""

UNKNOWN = "not known here"


def newest(title: str, name: str) -> str:
    """Returns the key of the name in the project's newest version."""
    own = (known for known in names() if known.project == title and known.words[0] == key_of(name))
    return next((key_of(known.now.partition(" ")[0]) for known in own), key_of(name))


def by_page(title: str, option: Option, name: str) -> Outcome:
    """Returns what the tables tell about an option.

    Args:
        name: its newest name.
    """
    if re.match(r"[A-Za-z_]\w*=", option.name):
        return lost("a variable of the environment: set it for rlhf train too")
    tables = (title, NEEDLESS, MISSING)
    known = [each for each in names() if each.project in tables and each.words[0] in (key_of(option.name), name)]
    if not known:
        return lost(UNKNOWN)
    plain = [each for each in known if not each.words[1]]
    with_value = [each for each in known if each.words[1]]
    with_value = [each for each in with_value if each.words[1] == option.value]
    if not (with_value or plain):
        return lost(f"this value has no counterpart; those with one: {', '.join(each.words[1] for each in known)}")
    one = (with_value or plain)[0]
    if one.here:
        return _settings(one, option, bool(with_value))
    if one.project == NEEDLESS:
        return same(one.about)
    return same("off, as it is here") if is_nothing(option) else lost(one.about)


def is_nothing(option: Option) -> bool:
    """Returns True if the option requests nothing: off, 0, or a group of 1."""
    if option.name.endswith("seed"):
        return False
    if option.is_off or not option.values:
        return option.is_off
    try:
        return option.number == 0 or (option.number == 1 and option.name.endswith("size"))
    except Unknown:
        return False


def _settings(known: Name, option: Option, fixed: bool) -> Outcome:
    settings: dict[str, Any] = {}
    words = known.here.replace(" and ", " ").split()
    free = []
    while words:
        name = words.pop(0).removeprefix("--")
        if words and not words[0].startswith("--"):
            settings |= set_flag(name, words.pop(0))
        else:
            free.append(name)
    if "resume" in free:
        return same("off, as it is here") if option.is_off else lost("to go on with a run: rlhf train --resume RUN_DIR")
    if len(free) > 1 or (free and fixed):
        return lost(f"see {known.here}" + (f" ({known.remark})" if known.remark else ""))
    if not free and option.is_off:
        return same("off, as it is here")
    if free and option.values and not option.missing and option.value.lower() in NONE:
        return same("not set, as it is here")
    for name in free:
        settings |= set_flag(name, option.written if option.values else "true")
    return to(settings, "" if free else known.remark)


def set_flag(name: str, value: Any) -> dict[str, Any]:
    """Returns a flag's setting in the form of a file: its key with dots, and the value."""
    path = name.replace("-", "_")
    if path in SINGLE:
        return {f"{path}.name": value}
    if path in MANY:
        return {f"{path}.{value}.name": value}
    return {path: value}
