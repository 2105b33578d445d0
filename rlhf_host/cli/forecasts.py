"""Forecasts of a run by packages, which ``rlhf train --dry-run`` prints.

A package takes part with an entry point in the group ``rlhf.forecasts``: a callable that takes the run's ``RunConfig`` and its
``PluginManager`` and returns lines. It raises ``UserError`` for a run that would fail.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_host.config.schema import RunConfig
from rlhf_host.errors import blaming
from rlhf_host.plugins.discovery import unchosen
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.plugins.selection import imported


def forecasts(config: RunConfig, manager: PluginManager) -> Iterator[str]:
    """Yields the lines of all packages. Raises ``UserError`` for a run that would fail, ``RunError`` for a package that does."""
    for info in unchosen("forecast"):
        forecast = imported(info)
        with blaming(str(info), "its call"):
            told = forecast(config, manager)
            lines = list(told)
            if isinstance(told, str) or not all(isinstance(line, str) for line in lines):
                raise TypeError("it must return lines, a list of texts")
        yield from lines
