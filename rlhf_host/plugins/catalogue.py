"""Plugins that can be installed by name: the lists of plugins that come with the host. ``scripts/generate_docs.py`` checks them.

Only these names ever get an install line: guessing package names invites squatters.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_host.plugins.discovery import GROUPS, HOST, normalised

OURS = Path(__file__).with_name("index.json")
"""The list of plugins that the project publishes; ``scripts/generate_docs.py`` writes it."""

OTHERS = Path(__file__).with_name("others.json")
"""The list of plugins that others publish and asked to have listed."""


class Offer(NamedTuple):
    """A distribution, and how it is installed."""

    distribution: str
    wanted: str
    """The words that pip is to install."""
    line: str
    """The whole command, with further options for pip, such as where the packages are."""

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Offer:
        wanted = entry.get("requirement") or entry["name"]
        return cls(entry["name"], wanted, _line([entry.get("pip_options")], wanted))


def install_line(*words: str) -> str:
    """Returns pip's command for names, versions and flags, with the options that the lists have for these names."""
    named = {normalised(re.split(r"[^\w.-]", word)[0]) for word in words}
    return _line({entry.get("pip_options"): 1 for entry in _entries() if normalised(entry["name"]) in named}, *words)


def _line(options: Iterable[str | None], *words: str) -> str:
    return " ".join(filter(None, ("pip install", *options, *map(shlex.quote, words))))


@cache
def offered() -> dict[str, dict[str, Offer]]:
    """Kind → plugin's name → the distribution that has it, without the host itself."""
    offers: dict[str, dict[str, Offer]] = {kind: {} for kind in GROUPS}
    for entry in _entries():
        for plugin in entry["plugins"] if normalised(entry["name"]) != HOST else ():
            offers[plugin["kind"]].setdefault(plugin["name"], Offer.of(entry))
    return offers


@cache
def listed(kind: str) -> list[Mapping[str, Any]]:
    """The plugins of a kind, as the lists have them, those of the host too."""
    return [plugin for entry in _entries() for plugin in entry["plugins"] if plugin["kind"] == kind]


@cache
def _entries() -> list[Mapping[str, Any]]:
    # As plain JSON: checking needs pydantic, which installing must not wait for.
    return [entry for path in (OURS, OTHERS) for entry in json.loads(path.read_bytes())["distributions"]]
