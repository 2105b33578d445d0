"""Which keys of the configuration select plugins, and of which kind."""

from __future__ import annotations

SINGLE = {
    "algo": "algo",
    "agent": "agent",
    "engine": "engine",
    "backend": "backend",
    "runtime": "runtime",
    "sync": "weight_sync",
}
"""Key → plugin kind, one plugin each."""

MANY = {"reward": "reward", "extensions": "extension", "tracker": "tracker"}
"""Key → plugin kind, an alias → plugin mapping each."""

SPELLINGS = {"with": "extensions"}
"""What people write → the schema's key (``with`` is a Python keyword)."""

REPLACED = frozenset({"reward"})
"""Selections that replace those of the layers below; the others add to them."""

ROLES = ("actor", "critic", "reference", "reward_model", "teacher")
"""Role names with a shorthand: ``--critic.lr`` for ``--roles.critic.lr``."""

CONVENTIONAL = (*ROLES, "reward")
"""Names that mean a role and no path where a role starts from another; ``--reward`` chooses plugins, so it is no shorthand."""

NONE = "none"
"""``ALIAS=none`` takes an extension or tracker of a lower layer away."""


def spelled(key: str) -> str:
    """The schema's key as people write it."""
    return next((spelling for spelling, name in SPELLINGS.items() if name == key), key)
