"""Plugins on the command line: names that complete, ``--kind``, ``--disable``. Imports neither torch nor any plugin."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from rlhf_host.errors import UserError, near_matches
from rlhf_host.plugins.discovery import DISABLE, GROUPS, PluginInfo, discover, normalised

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def matching(names: Mapping[str, str], incomplete: str) -> list[CompletionItem]:
    """Returns what ``incomplete`` could become, of names → help."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(name, help=text) for name, text in names.items() if name.startswith(incomplete)]


def complete_plugin(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """``NAME`` or ``DISTRIBUTION:NAME`` of an installed plugin."""
    kind = ctx.params.get("kind")
    return matching(named(info for info in discover() if kind in (None, info.kind)), incomplete)


def named(plugins: Iterable[PluginInfo]) -> dict[str, str]:
    """Returns each plugin's name (``distribution:name`` where two provide it) → its kinds."""
    kinds: dict[str, str] = {}
    for info in plugins:
        name = f"{info.distribution}:{info.name}" if info.status == "conflict" else info.name
        kinds[name] = f"{kinds[name]}, {info.kind}" if name in kinds else info.kind
    return kinds


def kind_option(text: str = "The kind, if plugins of several kinds have this name.") -> Any:
    """The option ``--kind``."""
    return click.option("--kind", type=click.Choice(list(GROUPS)), metavar="KIND", help=text)


@contextmanager
def left_out(names: Iterable[str | None]) -> Iterator[None]:
    """Leaves plugins out of discovery, here and in child processes, until the block is over.

    Raises:
        UserError: no installed plugin goes by a name.
    """
    specs = [spec.strip() for name in names for spec in str(name or "").split(",") if spec.strip()]
    known = discover(disabled=True) if specs else []
    for spec in specs:
        if not any(info.goes_by(spec) for info in known):
            if own := sorted({info.name for info in known if normalised(info.distribution) == normalised(spec)}):
                raise UserError(
                    f"--disable {spec}: this is a distribution; to ignore all its plugins, --disable {','.join(own)}"
                )
            near = near_matches(spec, sorted({info.name for info in known}))
            raise UserError(f"--disable {spec}: no such plugin is installed{near or '; rlhf plugins lists what is'}")
    before = os.environ.get(DISABLE)
    if specs:
        os.environ[DISABLE] = ",".join([*filter(None, [before]), *specs])
    try:
        yield
    finally:
        if before is not None:
            os.environ[DISABLE] = before
        elif specs:
            del os.environ[DISABLE]
