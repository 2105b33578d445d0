"""Scripts that a command of a shell script runs: ``bash -c "..."``, ``bash FILE``, ``./FILE``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlhf_translate.shell.here import SCRIPTS
from rlhf_translate.shell.word import Word

_SHELLS = ("bash", "sh", "zsh")


def script_of(words: Sequence[Word], place: int) -> int:
    """Returns the place of the script that ``bash -c`` runs; 0 if that is not here."""
    if words[place].text.rpartition("/")[2] not in _SHELLS:
        return 0
    for number in range(place + 1, len(words) - 1):
        if not words[number].text.startswith("-"):
            return 0
        if re.fullmatch(r"-[a-z]*c", words[number].text):
            return number + 1
    return 0


def file_of(words: Sequence[Word], place: int) -> int | None:
    """Returns the place of the file that a shell runs here, or that is the command itself."""
    if place == 0 and words[0].text.endswith(SCRIPTS):
        return 0
    if words[place].text.rpartition("/")[2] not in (*_SHELLS, "sbatch"):
        return None
    rest = (number for number in range(place + 1, len(words)) if not words[number].text.startswith("-"))
    return next((number for number in rest if words[number].text.endswith(SCRIPTS)), None)
