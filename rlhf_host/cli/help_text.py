"""Form of help texts: code in single backticks, and no line ends inside a name."""

from __future__ import annotations

from collections.abc import Iterable

import click

HYPHEN = "\u2011"
"""Stands for ``-`` while lines are broken: ``rlhf-runs`` is one word."""


class Formatter(click.HelpFormatter):
    def write_text(self, text: str) -> None:
        super().write_text(_whole(text))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl([(name, _whole(text)) for name, text in rows], col_max, col_spacing)

    def write(self, string: str) -> None:
        super().write(string.replace(HYPHEN, "-"))


class Context(click.Context):
    formatter_class = Formatter


def dress(command: click.Command, about: str) -> click.Command:
    """Lets a command's help look as all do; ``about``: what it does, where the command does not say so."""
    if command.context_class is click.Context:
        command.context_class = Context
    command.help = command.help or about
    return command


def _whole(text: str) -> str:
    return text.replace("``", "`").replace("-", HYPHEN)
