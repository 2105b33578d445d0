"""``rlhf plugins``: what is installed and whether it works."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from rlhf_host import __version__
from rlhf_host.plugins.discovery import GROUPS, PluginInfo, discover

if TYPE_CHECKING:
    from rlhf_host.plugins.verify import Inspection

FIELDS = ("kind", "name", "distribution", "version", "api", "status", "summary")
"""Keys of ``--json``."""


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects instead of a table.")
@click.option("--verify", is_flag=True, help="Import each plugin, in a process of its own, to find the broken ones.")
@click.option("--deadline", default=10.0, show_default=True, metavar="S", help="With --verify: seconds one import may take.")
@click.option("--kind", type=click.Choice(list(GROUPS)), metavar="KIND", help=f"Only this kind: {', '.join(GROUPS)}.")
@click.pass_context
def plugins(ctx: click.Context, as_json: bool, verify: bool, deadline: float, kind: str | None) -> None:
    """List installed plugins: kind, name, version, API range, status, distribution and its summary.

    Read from metadata, without importing any. Status: ok; incompatible (made for another rlhf-host); conflict (two
    distributions claim the name: choose with distribution:name); missing (its module is not there); broken (--verify).
    """
    if ctx.invoked_subcommand is not None:
        return
    found = [info for info in discover() if kind in (None, info.kind)]
    if verify:
        from rlhf_host.plugins.verify import verify as verified

        found = verified(found, deadline)
    if as_json:
        click.echo(json.dumps([{field: getattr(info, field) for field in FIELDS} for info in found], indent=2))
    elif found:
        click.echo("\n".join(_table(found, shutil.get_terminal_size().columns)))
    else:
        click.echo(f"No {kind} plugins installed." if kind else "No plugins installed.")


@plugins.command(short_help="Look inside one: source, hooks, options.")
@click.argument("name")
@click.option("--deadline", default=10.0, show_default=True, metavar="S", help="Seconds the import may take.")
@click.option("--kind", type=click.Choice(list(GROUPS)), metavar="KIND", help="Where several kinds share the name.")
@click.pass_context
def show(ctx: click.Context, name: str, deadline: float, kind: str | None) -> None:
    """Look inside the plugin NAME or DISTRIBUTION:NAME: where it comes from, its hooks and its options.

    Imports it in a process of its own. Exit code 1 when it cannot be used, with the reason.
    """
    from rlhf_host.plugins.selection import find_all
    from rlhf_host.plugins.verify import look_inside

    width = min(shutil.get_terminal_size().columns, 120)
    usable = True
    known = [info for info in discover() if kind in (None, info.kind)]
    for position, info in enumerate(find_all(name, known)):
        inside = look_inside(info, deadline)
        usable = usable and not inside.problem
        click.echo("\n".join([*([""] if position else []), *_description(info, inside, width)]))
    if not usable:
        ctx.exit(1)


def _table(found: Sequence[PluginInfo], width: int) -> Iterator[str]:
    """A line per plugin; what finds no room beside it goes below, indented."""
    rows = [("KIND", "NAME", "VERSION", "API", "STATUS")]
    rows += [(info.kind, info.name, info.version, info.api, info.status) for info in found]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)) for row in rows]
    yield f"{lines[0]}  DISTRIBUTION"[:width]
    told: set[str] = set()
    for info, line in zip(found, lines[1:], strict=True):
        # A summary is the distribution's, so it stands once for all its plugins.
        summary = "" if info.distribution in told else info.summary
        told.add(info.distribution)
        whole = f"{info.distribution}: {summary}" if summary else info.distribution
        beside, below = next(
            (beside, below)
            for beside, below in ((whole, ""), (info.distribution, summary), ("", whole))
            if not beside or len(line) + 2 + len(beside) <= width
        )
        yield f"{line}  {beside}".rstrip()
        problem = f"{info.status}: {info.problem}" if info.problem else ""
        yield from (f"    {note}" for text in (below, problem) for note in _wrap(text, width - 4))


def _description(info: PluginInfo, inside: Inspection, width: int) -> Iterator[str]:
    status = "broken" if inside.problem and info.status in ("ok", "conflict") else info.status
    rows = [
        ("from", f"{info.distribution} {info.version} ({info.value})"),
        ("file", inside.file),
        ("summary", info.summary),
        ("API", f"{info.api} (this is rlhf-host {__version__})"),
        ("status", status if not (info.problem or inside.problem) else f"{status}: {inside.problem or info.problem}"),
        ("hooks", ", ".join(inside.hooks)),
    ]
    yield f"{info.kind} {info.name}"
    for label, text in rows:
        if text:
            for number, line in enumerate(_wrap(text, width - 11)):
                yield f"  {'' if number else label:<7}  {line}"
    if inside.trace:
        yield ""
        yield from (f"    {line}" for line in inside.trace.rstrip().splitlines())
        return
    if inside.problem:
        return
    if info.kind != "preset":
        yield "  options" if inside.options else "  options  none"
    for option in inside.options:
        default = "required" if option["default"] is None else f"default {option['default']}"
        yield f"    {option['name']}  {option['type']}, {default}"
        yield from (f"        {line}" for line in _wrap(option["description"], width - 8))


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False)
