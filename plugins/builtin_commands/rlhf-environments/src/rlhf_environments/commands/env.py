"""``rlhf env``: environments for other projects, and theirs here."""

from __future__ import annotations

import click

from rlhf_host.commands import CommandGroup

HELP_GROUP = "Use a model"


@click.group(cls=CommandGroup)
def env() -> None:
    """Export agents and rewards as environments of other projects, and install theirs."""
