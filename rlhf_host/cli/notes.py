"""Notes about an installed plugin by packages, which ``rlhf plugins show`` prints.

A package takes part with an entry point in the group ``rlhf.notes``: a callable that takes a ``PluginInfo`` and returns lines.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_host.errors import asks_to_stop, in_one_line
from rlhf_host.plugins.discovery import PluginInfo, unchosen
from rlhf_host.plugins.selection import imported


def notes(info: PluginInfo) -> Iterator[str]:
    """Yields the lines of all packages; of one that fails its error, for what it would say must not be missed."""
    for package in unchosen("note"):
        try:
            yield from [str(line) for line in imported(package)(info)]
        except BaseException as error:
            if asks_to_stop(error):
                raise
            yield f"{package} failed: {in_one_line(error)}"
