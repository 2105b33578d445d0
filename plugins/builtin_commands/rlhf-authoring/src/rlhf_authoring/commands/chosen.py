"""The plugin that a command looks at, and its options as the command line has them. Imports neither torch nor any plugin."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import click

from rlhf_host import UserError
from rlhf_host.installed import HOOKED, PluginInfo, discover, find

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


def with_hooks(
    name: str, kind: str | None, options: dict[str, Any], lacks: str, kinds_without: Iterable[str] = ()
) -> list[PluginInfo]:
    """The plugins that ``name`` means and that have hooks or are of ``kinds_without`` them; presets beside them. Others have
    what ``lacks`` says. ``FILE.py:NAME`` means one class.

    Raises:
        UserError: there is none, or the options could be meant for several.
    """
    from rlhf_host.installed import find_all  # which loads pydantic

    if ".py:" in name:
        if kind is None:
            raise UserError(f"{name}: say of which kind this class is, as --kind reward")
        return [find(kind, name)]
    plugins = find_all(name, discover(), kind)
    called = [info for info in plugins if info.kind in (*HOOKED, "preset", *kinds_without)]
    if not called:
        raise UserError(f"{plugins[0].kind} {name!r} has {lacks}: see rlhf plugins show {name}")
    several = [info for info in called if info.kind != "preset"]
    if options and len(several) > 1:
        raise UserError(
            f"{name!r} is {' and '.join(map(str, several))}: say whose options these are, with --kind or DISTRIBUTION:NAME"
        )
    return [info for info in called if not options or info.kind != "preset"]


def deadline_option(default: float, text: str) -> Any:
    """The option ``--deadline``: seconds above 0."""

    def above_0(ctx: click.Context, param: click.Parameter, value: float) -> float:
        if not 0 < value < math.inf:
            raise UserError(f"--deadline {value:g}: should be a number of seconds above 0")
        return value

    return click.option(
        "--deadline", default=default, show_default=True, metavar="S", help=text, callback=above_0, is_eager=True
    )
