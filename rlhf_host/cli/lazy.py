"""Groups whose commands are imported only when they run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from rlhf_host.errors import UserError, near_matches

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Table: TypeAlias = Mapping[str, tuple[str, str]]
"""Name → (``module:attribute`` of the command, its line in the group's help)."""


class LazyGroup(click.Group):
    """A group of the commands in ``table``."""

    def __init__(self, *args: Any, table: Table, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.table:
            return None
        module, _, attribute = self.table[cmd_name][0].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        unknown = args and args[0] not in self.table and not args[0].startswith("-")
        if unknown and not ctx.resilient_parsing:  # which is how completion asks
            raise UserError(
                f"no command {args[0]!r}{near_matches(args[0], self.table) or f'; {ctx.command_path} --help lists them'}"
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self.table.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands and the group's own flags; click would import every command for its help."""
        from click.shell_completion import CompletionItem

        names = [CompletionItem(name, help=line) for name, (_, line) in self.table.items() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)
