"""Mistakes in settings: one line for each with the place that set it, raised together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from rlhf_host.errors import UserError

Path: TypeAlias = tuple[str | int, ...]
"""Keys on the way to a setting: ``("data", "sources", 0)``."""

Origins: TypeAlias = Mapping[Path, str]
"""The place where each value was set: ``--rollout.n``, or ``run.yaml:12: rollout.n``."""


class Problems:
    """Collects mistakes, and what people should know. A place is a text, or the path of a setting in ``origins``."""

    def __init__(self, origins: Origins | None = None):
        self.origins: Origins = origins or {}
        self.lines: list[str] = []
        self.notices: list[str] = []

    def add(self, place: str | Path, problem: str) -> None:
        self.lines.append(f"{self.where(place)}: {problem}")

    def where(self, place: str | Path) -> str:
        """The place that set a path, or the nearest around it; else the dotted path."""
        if isinstance(place, str):
            return place
        return self._origin(place) or ".".join(map(str, place))

    @contextmanager
    def at(self, place: str | Path) -> Iterator[None]:
        """Collect what the block refuses, after the place where there is one to show."""
        try:
            yield
        except UserError as error:
            known = place if isinstance(place, str) else self._origin(place)
            self.lines.append(f"{known}: {error}" if known else str(error))

    def refuse(self, kind: type[UserError] = UserError) -> None:
        """Raise one error with all lines, if there are any."""
        fail(self.lines, kind)

    def _origin(self, path: Path) -> str:
        near = (self.origins.get(path[:end]) for end in range(len(path), 0, -1))
        return next(filter(None, near), "")


def fail(lines: Iterable[str], kind: type[UserError] = UserError) -> None:
    """Raise one error with all ``lines``, if there are any."""
    unique = list(dict.fromkeys(lines))
    if unique:
        raise kind("\n".join(unique))
