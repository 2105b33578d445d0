"""``rlhf prometheus``: files for Prometheus and Grafana."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import click

from rlhf_host import UserError
from rlhf_host.commands import write_file

HELP_GROUP = "Look at runs"

FILES = ("dashboard.json", "alerts.yml", "prometheus.yml")
TARGET = "127.0.0.1:9464"


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--target", multiple=True, metavar="HOST:PORT", help=f"Where a run listens; repeatable (default {TARGET}).")
@click.option("--force", is_flag=True, help="Replace files there that are not as this command writes them.")
def prometheus(directory: Path, target: tuple[str, ...], force: bool) -> None:
    """Write a Grafana dashboard, alerts and a configuration of Prometheus for runs with --prometheus into DIRECTORY."""
    for text in target:
        host, colon, port = text.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 65536) or set(text) & set("\"'/\\ \n"):
            raise UserError(f"--target {text}: give HOST:PORT, such as {TARGET}")
    contents = {name: (files(__package__) / "files" / name).read_text("utf-8") for name in FILES}
    targets = ", ".join(f'"{text}"' for text in target or (TARGET,))
    contents["prometheus.yml"] = contents["prometheus.yml"].replace(f'"{TARGET}"', targets)
    paths = {directory / name: text for name, text in contents.items()}
    changed = [
        path for path, text in paths.items() if path.exists() and (not path.is_file() or path.read_text("utf-8") != text)
    ]
    if changed and not force:
        raise UserError(f"{changed[0]} exists and is another file: give another directory, or --force to replace it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UserError(f"{directory} is a file: give a directory") from error
    for path, text in paths.items():
        write_file(path, text.encode())
        click.echo(str(path))
    click.echo(f"Start Prometheus with --config.file={directory / 'prometheus.yml'}, and import dashboard.json in Grafana.")
