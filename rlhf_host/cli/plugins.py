"""``rlhf plugins``: what is installed and whether it works."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence

import click

from rlhf_host.cli.lazy import LazyGroup
from rlhf_host.cli.plugin_names import complete_plugin, kind_option, leave_out
from rlhf_host.plugins.discovery import DISABLE, GROUPS, PluginInfo, discover

COMMANDS: dict[str, tuple[str, str]] = {
    "show": ("rlhf_host.cli.plugins_show:show", "Show one: source, hooks, options."),
    "new": ("rlhf_host.cli.plugins_new:new", "Write a new one: a project that works at once."),
    "check": ("rlhf_host.cli.plugins_check:check", "Run the contract suite on one."),
    "bench": ("rlhf_host.cli.plugins_bench:bench", "Measure time and memory of each hook of one."),
    "install": ("rlhf_host.cli.plugins_install:install", "Install some, by name, path or wheel."),
    "uninstall": ("rlhf_host.cli.plugins_install:uninstall", "Uninstall some."),
    "requirements": ("rlhf_host.cli.plugins_requirements:requirements", "Print exact versions, to reproduce a run."),
}
"""Name → (``module:attribute`` of the command, its line in ``rlhf plugins --help``)."""

FIELDS = ("kind", "name", "distribution", "version", "api", "status", "summary")
"""Keys of ``--json``."""


@click.group(cls=LazyGroup, table=COMMANDS, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects instead of a table.")
@click.option("--verify", is_flag=True, help="Import each plugin in a separate process, to find broken ones.")
@click.option("--deadline", default=10.0, show_default=True, metavar="S", help="With --verify: seconds one import may take.")
@kind_option(f"Only this kind: {', '.join(GROUPS)}.")
@click.option(
    "--disable",
    shell_complete=complete_plugin,
    metavar="NAME",
    multiple=True,
    help=f"Ignore this plugin, as {DISABLE} does; repeatable.",
)
@click.pass_context
def plugins(ctx: click.Context, as_json: bool, verify: bool, deadline: float, kind: str | None, disable: Sequence[str]) -> None:
    """List installed plugins: kind, name, version, API range, status, distribution and its summary.

    This reads metadata and imports no plugin. Status: ok; incompatible (made for another rlhf-host); conflict (two
    distributions use the name: choose with distribution:name); missing (its module does not exist); broken (--verify);
    disabled (by --disable or RLHF_DISABLE_PLUGINS).
    """
    leave_out(ctx, disable)
    if ctx.invoked_subcommand is not None:
        return
    infos = [info for info in discover(disabled=True) if kind in (None, info.kind)]
    if verify:
        from rlhf_host.plugins.verify import verify as verified

        infos = verified(infos, deadline)
    if as_json:
        click.echo(json.dumps([{field: getattr(info, field) for field in FIELDS} for info in infos], indent=2))
    elif infos:
        click.echo("\n".join(_table(infos, shutil.get_terminal_size().columns)))
    else:
        click.echo(f"No {kind} plugins installed." if kind else "No plugins installed.")


def _table(infos: Sequence[PluginInfo], width: int) -> Iterator[str]:
    """A line per plugin; what finds no room beside it goes below, indented."""
    rows = [("KIND", "NAME", "VERSION", "API", "STATUS")]
    rows += [(info.kind, info.name, info.version, info.api, info.status) for info in infos]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)) for row in rows]
    yield f"{lines[0]}  DISTRIBUTION"[:width]
    shown: set[str] = set()
    for info, line in zip(infos, lines[1:], strict=True):
        # A summary is the distribution's, so it stands once for all its plugins.
        summary = "" if info.distribution in shown else info.summary
        shown.add(info.distribution)
        whole = f"{info.distribution}: {summary}" if summary else info.distribution
        beside, below = next(
            (beside, below)
            for beside, below in ((whole, ""), (info.distribution, summary), ("", whole))
            if not beside or len(line) + 2 + len(beside) <= width
        )
        yield f"{line}  {beside}".rstrip()
        problem = f"{info.status}: {info.problem}" if info.problem else ""
        yield from (f"    {note}" for text in (below, problem) for note in wrap(text, width - 4))


def wrap(text: str, width: int, head: str = "", indent: str = "") -> list[str]:
    """Lines of at most ``width`` characters; the first begins with ``head``, the others with ``indent``."""
    wrapper = textwrap.TextWrapper(max(width, 20), head, indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)
