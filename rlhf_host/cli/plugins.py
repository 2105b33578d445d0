"""``rlhf plugins``: what is installed and whether it works."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace

import click
from rich.cells import cell_len

from rlhf_host.cli.lazy import CommandGroup
from rlhf_host.cli.plugin_names import complete_plugin, kind_option, left_out
from rlhf_host.errors import visible
from rlhf_host.plugins.about import about
from rlhf_host.plugins.discovery import DISABLE, GROUPS, PluginInfo, discover, unchosen
from rlhf_host.plugins.reach import with_reach

HELP_GROUP = "Plugins"

WIDE = 140
"""Columns from which on a list names distributions too."""

FIELDS = ("kind", "name", "distribution", "version", "api", "status", "summary")
"""Keys of ``--json``."""


@click.group(cls=CommandGroup, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects instead of a table.")
@kind_option(f"Only this kind: {', '.join(GROUPS)}.")
@click.option(
    "--disable",
    shell_complete=complete_plugin,
    metavar="NAME",
    multiple=True,
    help=f"Ignore this plugin, as {DISABLE} does; repeatable.",
)
@click.pass_context
def plugins(ctx: click.Context, as_json: bool, kind: str | None, disable: Sequence[str]) -> None:
    """List installed plugins by kind: the name and what each does; on a wide terminal, and in a pipe, also the distribution.

    This imports no plugin: it reads metadata and docstrings. Status: ok; incompatible (made for another rlhf-host); conflict (two
    distributions use the name: choose with distribution:name); missing (its module does not exist); broken (a command that
    nothing can reach); disabled (by --disable or RLHF_DISABLE_PLUGINS).
    """
    ctx.with_resource(left_out(disable))
    if ctx.invoked_subcommand is not None:
        return
    known = [*discover(disabled=True), *(info for info in unchosen("python") if info.problem)]
    infos = with_reach([replace(info, summary=about(info)) for info in known if kind in (None, info.kind)])
    if as_json:
        click.echo(json.dumps([{field: getattr(info, field) for field in FIELDS} for info in infos], indent=2))
    else:
        width = shutil.get_terminal_size((10_000, 24)).columns  # in a pipe a plugin is one line
        click.echo("\n".join(_listing(infos, width)) or f"No {kind} plugins installed.")


def _listing(infos: Sequence[PluginInfo], width: int) -> Iterator[str]:
    """Yields plugins by kind, the sentence wrapped beside the name, and below it what is wrong with the plugin."""
    for kind in dict.fromkeys(info.kind for info in infos):
        members = [info for info in infos if info.kind == kind]
        yield click.style(f"{kind} ({len(members)})", bold=True)
        size = min(max(len(info.name) for info in members), width // 3) + 4
        for info in members:
            source = f" ({info.distribution} {info.version})" if width >= WIDE else ""
            head = f"  {visible(info.name)}  ".ljust(size)
            yield from wrap(visible(info.summary + source), width, head, " " * size) or [head.rstrip()]
            if info.problem:
                yield from wrap(visible(f"{info.status}: {info.problem}"), width, "    ", "    ")


def wrap(text: str, width: int, head: str = "", indent: str = "") -> list[str]:
    """Lines of at most ``width`` columns, unless one word is longer; the first begins with ``head``, the others with ``indent``."""
    lines, gap = [head], ""
    for word in text.split():
        if lines[-1].strip() and cell_len(lines[-1] + gap + word) > width:
            lines, gap = [*lines, indent], ""
        lines[-1] += gap + word
        gap = " "
    return [line.rstrip() for line in lines] if text.split() else []
