"""Groups of commands that packages contribute by entry points: listed from metadata, imported when one runs."""

from __future__ import annotations

import contextlib
import io
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import click

from rlhf_host.cli.help_text import Context, dress
from rlhf_host.cli.plugin_names import matching
from rlhf_host.errors import PluginError, UserError, closest, near_matches
from rlhf_host.plugins.about import about, help_group
from rlhf_host.plugins.catalogue import offered
from rlhf_host.plugins.discovery import PluginInfo, discover, normalised
from rlhf_host.plugins.hints import UnknownName, of_nobody, of_packages
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
        prefix: what the entry points' names begin with: ``plugins.``; empty for ``rlhf``. Default: the group's own name and a dot.
    """

    context_class = Context

    def __init__(self, *args: Any, prefix: str | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.prefix = f"{self.name}." if prefix is None else prefix
        self._own_prefix = prefix is None

    def installed(self) -> dict[str, PluginInfo]:
        """Returns the commands by name; ``DISTRIBUTION:NAME`` where several distributions have the same."""
        own = {}
        for info in discover():
            name = info.name.removeprefix(self.prefix)
            if info.kind == "command" and info.name.startswith(self.prefix) and name and "." not in name:
                own[f"{info.distribution}:{name}" if info.status == "conflict" else name] = info
        return own

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.installed(), *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        distribution, colon, name = cmd_name.rpartition(":")
        spec = f"{distribution}{colon}{self.prefix}{name}"
        commands = [info for info in discover() if info.kind == "command"]
        if not any(info.goes_by(spec) for info in commands):
            return super().get_command(ctx, cmd_name)
        completes = ctx is not None and ctx.resilient_parsing
        try:
            with quiet() if completes else contextlib.nullcontext():
                info = find("command", spec, commands)
                command = dress(load_command(info), about(info))
        except PluginError:
            if not completes:
                raise
            return click.Command(cmd_name, add_help_option=False)  # completion has nothing to offer, and no place for a message
        if isinstance(command, CommandGroup) and command._own_prefix:
            command.prefix = f"{info.name}."
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        known = ctx.resilient_parsing or not args or args[0].startswith("-")  # the first is how completion asks
        if not known and self.get_command(ctx, args[0]) is None:
            hint = self.where(args[0]) or of_packages(UnknownName("command", self.prefix + args[0])) or self.hint(args[0])
            hint = hint or self.near(args[0], ctx)
            raise UserError(f"no command {args[0]!r}{hint or f'; {ctx.command_path} --help lists them{of_nobody()}'}")
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            _refuse_twice(command, rest)
        return name, command, rest

    def where(self, word: str) -> str:
        """Returns why a published command is not here, and how it is installed: ``; ...``, or nothing."""
        distribution, _, own = word.rpartition(":")
        name = f"{self.prefix}{own}"
        for info in discover(disabled=True):
            if info.kind == "command" and info.name == name and info.status == "disabled":
                return f"; it is {info.problem}"
        sources = [info.distribution for info in discover() if info.kind == "command" and info.name == name]
        if sources:
            return f"; {' and '.join(sources)} {'has' if len(sources) == 1 else 'have'} {own!r}: {sources[0]}:{own}"
        offer = offered()["command"].get(name)
        if offer is None or normalised(distribution) not in ("", normalised(offer.distribution)):
            return ""
        return f" is installed; {offer.line}"

    def near(self, word: str, ctx: click.Context) -> str:
        """Returns commands with names like this one, and what to install for one that is not here: ``; ...``, or nothing."""
        here = self.list_commands(ctx)
        names = (name.removeprefix(self.prefix) for name in offered()["command"] if name.startswith(self.prefix))
        matches = closest(word, [*here, *(name for name in names if "." not in name)])
        if not matches or matches[0] in here:
            return near_matches(word, here)
        return f"; did you mean {matches[0]!r}? It is not installed: {offered()['command'][self.prefix + matches[0]].line}"

    def hint(self, word: str) -> str:
        """Returns what else an unknown command may mean: ``; ...``, or nothing."""
        return ""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for name, info in self.installed().items():
            line = about(info) if info.status == "ok" else f"{info.status}: {info.problem}"
            sections["" if self.prefix else help_group(info)].append((name, line))
        for name, command in self.commands.items():
            if not command.hidden:
                sections[""].append((name, command.get_short_help_str(200)))
        for title in sorted(sections, key=_place):
            with formatter.section(title or OTHER):
                formatter.write_dl(sections[title])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands and the group's own flags; click would import every command for its help."""
        texts = {name: about(info) for name, info in self.installed().items()}
        texts |= {name: command.get_short_help_str(200) for name, command in self.commands.items() if not command.hidden}
        return matching(texts, incomplete) + click.Command.shell_complete(self, ctx, incomplete)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps what imports print from the shell, which reads our output for completion."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _place(title: str) -> tuple[int, str]:
    """Sorts sections: the host's, then others by name, those without one last."""
    known = HELP_GROUPS.index(title) if title in HELP_GROUPS else len(HELP_GROUPS)
    return (known, title) if title else (len(HELP_GROUPS) + 1, title)


def _refuse_twice(command: click.Command, words: Sequence[str]) -> None:
    """Raises ``UserError`` for an option that takes one value and is given several: click would take the last."""
    below = [*command.installed(), *command.commands] if isinstance(command, CommandGroup) else ()
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
