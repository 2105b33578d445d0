"""Plugins' states across a resume, and the versions that wrote them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from rlhf_host.errors import RunError
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.plugins.selection import PYTHON

log = logging.getLogger(__name__)


def plugin_sources(manager: PluginManager) -> dict[str, str]:
    """Returns key → ``distribution version`` of the installed plugins."""
    return {item.key: item.info.source for item in manager.loaded if item.info.distribution != PYTHON}


def load_plugins(manager: PluginManager, states: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Gives plugins their states back, and reports those whose version is not the one that wrote the checkpoint.

    Args:
        sources: ``plugin_sources`` at the time of the checkpoint.

    Raises:
        RunError: a plugin rejects its state.
    """
    now = plugin_sources(manager)
    changed = {key: (then, now[key]) for key, then in sources.items() if now.get(key, then) != then}
    for key, (then, other) in changed.items():
        log.warning("%s is of %s now; %s wrote the checkpoint", key, other, then)
    for key, state in states.items():
        try:
            manager.call(key, "load_state_dict", state=state)
        except Exception as error:
            if key not in changed:
                raise
            raise RunError(f"{error}; its state was written by {changed[key][0]}: install that version again") from error
