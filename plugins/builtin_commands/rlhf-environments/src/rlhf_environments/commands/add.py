"""``rlhf env add``: environments of other projects, installed by pip."""

from __future__ import annotations

import sys

import click

HELP_GROUP = "Use a model"

USE = {
    "verifiers": "rlhf train --agent verifiers --agent.environment {module} --agent.python {python} --data verifiers"
    " --data.verifiers.environment {module} --data.verifiers.python {python}",
    "openenv": "start its server, then: rlhf train --agent openenv --agent.url http://127.0.0.1:8000",
    "nemo-gym": "rlhf train --agent nemo_gym --agent.configs resources_servers/{name}/configs/{name}.yaml --agent.python {python}",
}


@click.command()
@click.argument("name")
@click.option(
    "--python", metavar="PATH", help="The Python to install into, best one of its own. [default: the one rlhf runs in]"
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Say what would be installed, and stop.")
def add(name: str, python: str | None, yes: bool, dry_run: bool) -> None:
    """Find an environment of another project, and install it with pip.

    NAME is verifiers:OWNER/NAME of its hub or verifiers:PACKAGE of the package index, openenv:OWNER/SPACE or openenv:PACKAGE, or
    nemo-gym:NAME. @VERSION may follow. What was found is shown before anything is installed.
    """
    from rlhf_environments import hubs

    place = hubs.checked(python or sys.executable)
    asked = hubs.wanted(name)
    found = hubs.found(asked, place)
    for each in found:
        click.echo(f"{each['name']} {each['version']} from {each['from']}")
    if not found:
        click.echo(f"{' '.join(asked.words)} is installed already")
    if dry_run:
        return
    if found:
        if not yes:
            click.confirm(f"Install {len(found)} into {place}?", abort=True)
        hubs.install(asked, place)
    use = USE[asked.hub].format(name=asked.name, module=asked.name.replace("-", "_").lower(), python=place)
    click.echo(f"{asked.hub}:{asked.name} is installed\n  {use}")
