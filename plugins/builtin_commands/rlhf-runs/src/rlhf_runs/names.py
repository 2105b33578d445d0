"""Names for runs that are shown together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_host import UserError


def names_of(paths: Sequence[Path]) -> list[str]:
    """Returns the shortest ends of the paths that differ. Raises ``UserError`` for a directory that occurs twice."""
    whole = [path.resolve() for path in paths]
    if twice := next((path for path, place in zip(paths, whole, strict=True) if whole.count(place) > 1), None):
        raise UserError(f"{twice} is given twice")
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len({*names}) == len(names):
            return names
    return [str(path) for path in paths]
