"""``rlhf data``: what a run makes of data, and the tokens that runs keep of it."""

from __future__ import annotations

import click

from rlhf_host.cli.lazy import LazyGroup

COMMANDS: dict[str, tuple[str, str]] = {
    "show": (
        "rlhf_host.cli.data_show:show",
        "Show how a file is read: its format, lengths, and rows with their trained tokens.",
    ),
    "clear": ("rlhf_host.cli.data_clear:clear", "Remove the tokens of data that earlier runs kept."),
}
"""Name → (``module:attribute`` of the command, its line in ``rlhf data --help``)."""


@click.group(cls=LazyGroup, table=COMMANDS)
def data() -> None:
    """Look at data as a run reads it, and remove what runs keep of it."""
