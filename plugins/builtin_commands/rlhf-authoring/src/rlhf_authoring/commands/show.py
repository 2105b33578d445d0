"""``rlhf plugins show``: where a plugin comes from, its hooks and its options."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import click

from rlhf_authoring.commands.chosen import deadline_option
from rlhf_authoring.inspection import Inspection, look_inside, verify
from rlhf_host import __version__
from rlhf_host.commands import asks_to_stop, complete_plugin, kind_option, wrap
from rlhf_host.installed import PluginInfo, about, discover, find_all
from rlhf_host.internals import WITHOUT_OPTIONS, imported, in_one_line, unchosen


@click.command()
@click.argument("name", required=False, shell_complete=complete_plugin)
@deadline_option(10.0, "Seconds one import may take.")
@kind_option()
@click.pass_context
def show(ctx: click.Context, name: str | None, deadline: float, kind: str | None) -> None:
    """Show the plugin NAME or DISTRIBUTION:NAME: where it comes from, its hooks and its options.

    The plugin is imported in a separate process. If it cannot be used, the reason is shown and the exit code is 1. Without NAME,
    all are imported, or all of a kind, and those that cannot be used are shown.
    """
    width = min(shutil.get_terminal_size().columns, 120)
    if name is None:
        looked_at = verify([info for info in discover() if kind in (None, info.kind)], deadline)
        broken = [info for info in looked_at if info.status != "ok"]
        for info in broken:
            click.echo("\n".join(wrap(f"{info.kind} {info.name}: {info.status}: {info.problem}", width, indent="    ")))
        click.echo(f"{len(looked_at) - len(broken)} of {len(looked_at)} plugins can be used")
        ctx.exit(1 if broken else 0)
    usable = True
    for position, info in enumerate(find_all(name, discover(disabled=True), kind)):
        inside = look_inside(info, deadline)
        usable = usable and not inside.problem
        click.echo("\n".join([*([""] if position else []), *_description(info, inside, width)]))
    if not usable:
        ctx.exit(1)


def _description(info: PluginInfo, inside: Inspection, width: int) -> Iterator[str]:
    status = "broken" if inside.problem and info.status in ("ok", "conflict") else info.status
    rows = [
        ("from", f"{info.distribution} {info.version} ({info.value})"),
        ("file", inside.file),
        ("summary", about(info)),
        ("API", f"{info.api} (this is rlhf-host {__version__})"),
        ("status", status if not (info.problem or inside.problem) else f"{status}: {inside.problem or info.problem}"),
        ("hooks", ", ".join(inside.hooks)),
        *(("note", text) for text in notes(info)),
    ]
    yield f"{info.kind} {info.name}"
    for label, text in rows:
        if text:
            for number, line in enumerate(wrap(text, width - 11)):
                yield f"  {'' if number else label:<7}  {line}"
    if inside.trace:
        yield ""
        yield from (f"    {line}" for line in inside.trace.rstrip().splitlines())
        return
    if inside.problem:
        return
    if info.kind not in WITHOUT_OPTIONS:
        yield "  options" if inside.options else "  options  none"
    for option in inside.options:
        default = "required" if option["default"] is None else f"default {option['default']}"
        yield from wrap(f"{option['type']}, {default}", width, f"    {option['name']}  ", "      ")
        yield from (f"        {line}" for line in wrap(option["description"], width - 8))


def notes(info: PluginInfo) -> Iterator[str]:
    """Yields notes about a plugin by packages; of one that fails its error, for what it would say must not be missed.

    A package takes part with an entry point in the group ``rlhf.notes``: a callable that takes a ``PluginInfo`` and returns lines.
    """
    for package in unchosen("note"):
        try:
            yield from [str(line) for line in imported(package)(info)]
        except BaseException as error:
            if asks_to_stop(error):
                raise
            yield f"{package} failed: {in_one_line(error)}"
