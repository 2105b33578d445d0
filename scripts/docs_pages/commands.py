"""The page of commands: the help of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click
from click.testing import CliRunner

from docs_pages.catalogue import published
from rlhf_host.cli.main import main as command_line
from rlhf_host.plugins.discovery import DISABLE, discover


def page() -> str:
    parts = ["# Commands", "The output of `--help` for every command."]
    for path in command_paths():
        shown = " ".join(("rlhf", *path))
        parts += [f"## {shown}", f"```text\n{help_text(path)}\n```"]
    return "\n\n".join(parts)


def command_paths() -> list[tuple[str, ...]]:
    """Every command, as the words that follow ``rlhf``; the group itself first."""
    return list(_walk(command_line, ()))


def _walk(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if getattr(command, "hidden", False):
        return
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command, info_name="rlhf")
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None:
                yield from _walk(inner, (*path, name))


def help_text(path: Sequence[str]) -> str:
    own = {info.distribution for info in published()}
    others = ",".join(f"{info.distribution}:{info.name}" for info in discover() if info.distribution not in own)
    found = CliRunner().invoke(command_line, [*path, "--help"], env={"COLUMNS": "100", DISABLE: others}, prog_name="rlhf")
    if found.exit_code:
        raise RuntimeError(f"rlhf {' '.join(path)} --help failed: {found.output}")
    return found.output.rstrip()
