"""``rlhf``: the command group, and how an error ends a command."""

from __future__ import annotations

import errno
import logging
from typing import Any

import click

from rlhf_host import __version__
from rlhf_host.cli.lazy import CommandGroup
from rlhf_host.errors import RunError, UserError, a, visible
from rlhf_host.interrupts import signals_interrupt

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Standard output is a file on a full disk."""


class Visible(logging.Formatter):
    """Warnings as one sees them: a model's text in them moves no cursor."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(visible, super().format(record).split("\n")))


class Failure(click.ClickException):
    """A message for a person, and the exit code."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__("\n".join(map(visible, message.split("\n"))))
        self.exit_code = exit_code  # type: ignore[misc]


class Main(CommandGroup):
    """Turns the project's errors into a message and an exit code, without a traceback."""

    def hint(self, word: str) -> str:
        """Returns how a plugin of this name is used, if it is installed or listed."""
        from rlhf_host.config.flag_names import CHOICES
        from rlhf_host.plugins.catalogue import offered
        from rlhf_host.plugins.discovery import discover

        name = word.removeprefix("train_").removeprefix("train-")
        for info in discover():
            if info.name == name and info.kind in CHOICES:
                return f"; {name!r} is {a(info.kind)}: rlhf train --{CHOICES[info.kind]} {name} --help"
        offers = [(kind, names[name]) for kind, names in offered().items() if name in names]
        return f"; {name!r} is {a(offers[0][0])} that is not installed: {offers[0][1].line}" if offers else ""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with signals_interrupt():
                return super().invoke(ctx)
        except UserError as error:
            raise Failure(str(error), 2) from error
        except RunError as error:
            raise Failure(str(error)) from error
        except OSError as error:
            if error.filename is None and error.errno not in FULL:
                raise
            raise Failure(f"{error.filename or 'the output cannot be written'}: {error.strerror}") from error
        except KeyboardInterrupt as interrupt:
            click.echo(str(interrupt) or "Interrupted.", err=True)
            ctx.exit(130)


@click.group(cls=Main, prefix="", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rlhf")
def main() -> None:
    """Post-training for language models: algorithms, rewards and environments are plugins."""
    if logging.lastResort is not None:  # which prints warnings where nobody set up a handler
        logging.lastResort.setFormatter(Visible())


if __name__ == "__main__":
    main(prog_name="rlhf")
