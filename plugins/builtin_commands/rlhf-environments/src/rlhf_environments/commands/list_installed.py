"""``rlhf env list``: environments of other projects that a Python has."""

from __future__ import annotations

import json as json_module
import sys

import click

HELP_GROUP = "Use a model"


@click.command("list")
@click.option("--python", metavar="PATH", help="The Python to look into. [default: the one rlhf runs in]")
@click.option("--json", is_flag=True, help="Print a JSON list.")
def list_installed(python: str | None, json: bool) -> None:
    """List environments of verifiers, OpenEnv and NeMo Gym that are installed."""
    from rlhf_environments import hubs

    place = hubs.checked(python or sys.executable)
    found = hubs.installed(place)
    if json:
        click.echo(json_module.dumps(found, indent=2))
        return
    for each in found:
        click.echo(f"{each['hub']:<10} {each['name']} {each['version']}")
    if not found:
        click.echo(f"{place} has none: rlhf env add NAME installs one")
