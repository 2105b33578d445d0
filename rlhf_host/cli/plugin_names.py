"""Plugins on the command line: names that complete, ``--kind``, ``--disable``. Imports neither torch nor any plugin."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from rlhf_host.errors import UserError, near_matches
from rlhf_host.plugins.discovery import DISABLE, GROUPS, HOOKED, PluginInfo, discover

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def matching(names: Mapping[str, str], incomplete: str) -> list[CompletionItem]:
    """What ``incomplete`` could become, of names → help."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(name, help=text) for name, text in names.items() if name.startswith(incomplete)]


def complete_plugin(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """``NAME`` or ``DISTRIBUTION:NAME`` of an installed plugin."""
    kind = ctx.params.get("kind")
    return matching(named(info for info in discover() if kind in (None, info.kind)), incomplete)


def named(plugins: Iterable[PluginInfo]) -> dict[str, str]:
    """How each plugin is called (``distribution:name`` where two provide it) → its kinds."""
    kinds: dict[str, str] = {}
    for info in plugins:
        name = f"{info.distribution}:{info.name}" if info.status == "conflict" else info.name
        kinds[name] = f"{kinds[name]}, {info.kind}" if name in kinds else info.kind
    return kinds


def kind_option(text: str = "The kind, if plugins of several kinds have this name.") -> Any:
    """The option ``--kind``."""
    return click.option("--kind", type=click.Choice(list(GROUPS)), metavar="KIND", help=text)


def leave_out(ctx: click.Context, names: Iterable[str | None]) -> None:
    """Leave plugins out of discovery, here and in child processes, until the command is over.

    Raises:
        UserError: no installed plugin goes by a name.
    """
    specs = [spec.strip() for name in names for spec in (name or "").split(",") if spec.strip()]
    if not specs:
        return
    known = discover(disabled=True)
    for spec in specs:
        if not any(info.goes_by(spec) for info in known):
            near = near_matches(spec, sorted({info.name for info in known}))
            raise UserError(f"--disable {spec}: no such plugin is installed{near or '; rlhf plugins lists what is'}")
    before = os.environ.get(DISABLE)
    os.environ[DISABLE] = ",".join([*filter(None, [before]), *specs])

    def restore() -> None:
        if before is None:
            del os.environ[DISABLE]
        else:
            os.environ[DISABLE] = before

    ctx.call_on_close(restore)


option_option = click.option(
    "--option",
    multiple=True,
    metavar="KEY=VALUE",
    help="An option of the plugin, as --algo.KEY VALUE would set it; repeatable.",
)


def parse_texts(texts: Iterable[str]) -> dict[str, Any]:
    """``clip-eps=0.2`` and ``a.b=1`` as the nested mapping that a configuration would hold.

    Raises:
        UserError: a text is not KEY=VALUE.
    """
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        parts = key.replace("-", "_").split(".")
        if not equals or not all(parts):
            raise UserError(f"--option {text}: write KEY=VALUE")
        place = options
        for part in parts[:-1]:
            inner = place.setdefault(part, {})
            if not isinstance(inner, dict):
                raise UserError(f"--option {text}: {part!r} already has a value")
            place = inner
        if parts[-1] in place:
            raise UserError(f"--option {text}: {parts[-1]!r} already has a value")
        place[parts[-1]] = value
    return options


def with_hooks(name: str, kind: str | None, options: dict[str, Any], kinds_without: Iterable[str] = ()) -> list[PluginInfo]:
    """The plugins that ``name`` means and that have hooks or are of ``kinds_without`` them; presets beside them.

    Raises:
        UserError: there is none, or the options could be meant for several.
    """
    from rlhf_host.plugins.selection import find_all

    plugins = find_all(name, [info for info in discover() if kind in (None, info.kind)])
    called = [info for info in plugins if info.kind in (*HOOKED, "preset", *kinds_without)]
    if not called:
        raise UserError(f"{plugins[0].kind} {name!r} has no hooks to call: see rlhf plugins show {name}")
    several = [info for info in called if info.kind != "preset"]
    if options and len(several) > 1:
        raise UserError(
            f"{name!r} is {' and '.join(map(str, several))}: say whose options these are, with --kind or DISTRIBUTION:NAME"
        )
    return [info for info in called if not options or info.kind != "preset"]
