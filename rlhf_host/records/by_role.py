"""Quantities by role, which the host computes where a plugin's needs ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class NotAsked(KeyError):
    """A quantity of a role that no plugin has asked for."""

    __str__ = Exception.__str__  # without the quotes of a key


class OfRoles(dict[str, Any]):
    """A quantity by role; where it is not there, the error says how to ask for it.

    Args:
        place: what plugins call it: ``batch.values``.
        what: the ``Output`` that asks for it.
    """

    def __init__(self, place: str, what: str, values: Mapping[str, Any]):
        super().__init__(values)
        self.place, self.what = place, what

    def __missing__(self, role: str) -> Any:
        asked = f"add Output({self.what!r}, role={role!r}) to the outputs of its Needs"
        raise NotAsked(f"{self.place} has no {role!r}, because no plugin asks for it: {asked}")
