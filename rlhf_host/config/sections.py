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

SHORTHANDS = {
    "actor": "actor",
    "critic": "critic",
    "reference": "reference",
    "reward_model": "reward",  # --reward chooses what judges
    "teacher": "teacher",
}
"""Shorthand → role: ``--critic.lr`` for ``--roles.critic.lr``, ``--reward-model.dtype`` for ``--roles.reward.dtype``."""

ROLES = tuple(SHORTHANDS.values())
"""Roles with a shorthand; where a role starts from another, these names mean a role and no path."""

NONE = "none"
"""``ALIAS=none`` takes an extension or tracker of a lower layer away."""


def role_flag(role: str) -> str:
    """The role's section as flags spell it, without dashes: ``critic``, ``reward-model``, ``roles.helper``."""
    return next((name.replace("_", "-") for name, known in SHORTHANDS.items() if known == role), f"roles.{role}")


def spelled(key: str) -> str:
    """The schema's key as people write it."""
    return next((spelling for spelling, name in SPELLINGS.items() if name == key), key)
