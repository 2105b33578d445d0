"""``rlhf data``: what a run makes of data, and the tokens that runs keep of it."""

from __future__ import annotations

import click

from rlhf_host.commands import CommandGroup

HELP_GROUP = "Train"


@click.group(cls=CommandGroup)
def data() -> None:
    """Look at data as a run reads it, and remove what runs keep of it."""
