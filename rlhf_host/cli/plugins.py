"""``rlhf plugins``: what is installed and whether it works."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

import click

from rlhf_host.cli.lazy import CommandGroup
from rlhf_host.cli.plugin_names import complete_plugin, kind_option, left_out
from rlhf_host.plugins.about import about
from rlhf_host.plugins.discovery import DISABLE, GROUPS, PluginInfo, discover
from rlhf_host.plugins.reach import with_reach

HELP_GROUP = "Plugins"

WIDE = 140
"""Columns from which on a table has all there is to say."""

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
    """List installed plugins: kind, name and what each does; on a wide terminal also version, API range, status and distribution.

    This imports no plugin: it reads metadata and docstrings. Status: ok; incompatible (made for another rlhf-host); conflict (two
    distributions use the name: choose with distribution:name); missing (its module does not exist); broken (a command that
    nothing can reach); disabled (by --disable or RLHF_DISABLE_PLUGINS).
    """
    ctx.with_resource(left_out(disable))
    if ctx.invoked_subcommand is not None:
        return
    infos = with_reach([replace(info, summary=about(info)) for info in discover(disabled=True) if kind in (None, info.kind)])
    if as_json:
        click.echo(json.dumps([{field: getattr(info, field) for field in FIELDS} for info in infos], indent=2))
    elif infos:
        click.echo("\n".join(_table(infos, shutil.get_terminal_size().columns)))
    else:
        click.echo(f"No {kind} plugins installed." if kind else "No plugins installed.")


def _table(infos: Sequence[PluginInfo], width: int) -> Iterator[str]:
    """A line per plugin, as wide as there is room; below it what is wrong with it."""
    rows = [("KIND", "NAME", "VERSION", "API", "STATUS", "DISTRIBUTION")]
    rows += [(info.kind, info.name, info.version, info.api, info.status, info.distribution) for info in infos]
    columns = range(len(rows[0]) if width >= WIDE else 2)
    widths = [max(len(row[column]) for row in rows) for column in columns]
    for info, row in zip([None, *infos], rows, strict=True):
        line = "  ".join(row[column].ljust(size) for column, size in zip(columns, widths, strict=True))
        room = width - len(line) - 2
        text = "ABOUT" if info is None else info.summary
        yield f"{line}  {text if len(text) <= room else text[: room - 1].rstrip() + '…'}".rstrip()
        if info is not None and info.problem:
            yield from (f"    {note}" for note in wrap(f"{info.status}: {info.problem}", width - 4))


def wrap(text: str, width: int, head: str = "", indent: str = "") -> list[str]:
    """Lines of at most ``width`` characters; the first begins with ``head``, the others with ``indent``."""
    wrapper = textwrap.TextWrapper(max(width, 20), head, indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)
