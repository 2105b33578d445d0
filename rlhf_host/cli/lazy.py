"""Groups of commands that packages contribute by entry points: listed from metadata, imported when one runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import click

from rlhf_host.errors import UserError, near_matches
from rlhf_host.plugins import habits
from rlhf_host.plugins.about import about, help_group
from rlhf_host.plugins.catalogue import offered
from rlhf_host.plugins.discovery import PluginInfo, discover
from rlhf_host.plugins.selection import find, load_command

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

HELP_GROUPS = ("Train", "Look at runs", "Use a model", "Plugins")
"""Sections of ``rlhf --help`` that come first, in this order."""

OTHER = "Commands"
"""The section of commands that name none."""


class CommandGroup(click.Group):
    """A group of the installed commands whose entry points in ``rlhf.commands`` are called ``PREFIX.NAME``; of ``rlhf`` itself
    ``NAME``.

    Args:
        prefix: the group's own name and a dot, ``plugins.``; empty for ``rlhf``.
        habits: what people type in their place, as in ``plugins.habits``.
    """

    def __init__(self, *args: Any, prefix: str = "", habits: Mapping[str, str], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.prefix, self.habits = prefix, habits

    def installed(self) -> dict[str, PluginInfo]:
        """Returns the commands by name; ``DISTRIBUTION:NAME`` where several distributions have the same."""
        own = {}
        for info in discover():
            name = info.name.removeprefix(self.prefix)
            if info.kind == "command" and info.name.startswith(self.prefix) and name and "." not in name:
                own[f"{info.distribution}:{name}" if info.status == "conflict" else name] = info
        return own

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.installed())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        distribution, colon, name = cmd_name.rpartition(":")
        spec = f"{distribution}{colon}{self.prefix}{name}"
        commands = [info for info in discover() if info.kind == "command"]
        if not any(info.goes_by(spec) for info in commands):
            return None
        return load_command(find("command", spec, commands))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        known = ctx.resilient_parsing or not args or args[0].startswith("-")  # the first is how completion asks
        if not known and self.get_command(ctx, args[0]) is None:
            hint = self.where(args[0]) or habits.of(args[0], self.habits) or self.hint(args[0])
            hint = hint or near_matches(args[0], self.installed())
            raise UserError(f"no command {args[0]!r}{hint or f'; {ctx.command_path} --help lists them'}")
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            _refuse_twice(command, rest)
        return name, command, rest

    def where(self, word: str) -> str:
        """Returns why a published command is not here, and how it is installed: ``; ...``, or nothing."""
        name = f"{self.prefix}{word}"
        for info in discover(disabled=True):
            if info.kind == "command" and info.name == name and info.status == "disabled":
                return f"; it is {info.problem}"
        offer = offered()["command"].get(name)
        return f" is installed; {offer.line}" if offer is not None else ""

    def hint(self, word: str) -> str:
        """Returns what else an unknown command may mean: ``; ...``, or nothing."""
        return ""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for name, info in self.installed().items():
            line = about(info) if info.status == "ok" else f"{info.status}: {info.problem}"
            sections["" if self.prefix else help_group(info)].append((name, line))
        for title in sorted(sections, key=_place):
            with formatter.section(title or OTHER):
                formatter.write_dl(sections[title])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands and the group's own flags; click would import every command for its help."""
        from click.shell_completion import CompletionItem

        names = [
            CompletionItem(name, help=about(info)) for name, info in self.installed().items() if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)


def _place(title: str) -> tuple[int, str]:
    """Sorts sections: the host's, then others by name, those without one last."""
    known = HELP_GROUPS.index(title) if title in HELP_GROUPS else len(HELP_GROUPS)
    return (known, title) if title else (len(HELP_GROUPS) + 1, title)


def _refuse_twice(command: click.Command, words: Sequence[str]) -> None:
    """Raises ``UserError`` for an option that takes one value and is given several: click would take the last."""
    below = command.installed() if isinstance(command, CommandGroup) else ()
    own = list(takewhile(lambda word: word != "--" and word not in below, words))
    for option in command.params:
        if isinstance(option, click.Option) and not option.multiple:
            given = [name for word in own for name in (*option.opts, *option.secondary_opts) if _is_of(word, name)]
            if len(set(given) if option.is_flag else given) > 1:
                same = len(set(given)) == 1
                raise UserError(f"{given[0]} can be given once" if same else f"{' and '.join(given)}: leave one out")


def _is_of(word: str, name: str) -> bool:
    """Returns True if a word of the command line gives this option; ``-o`` may have its value behind it."""
    return word == name or word.startswith(f"{name}=" if name.startswith("--") else name)
