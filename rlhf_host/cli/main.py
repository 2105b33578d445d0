"""``rlhf``: the command group. A command's module is imported only when that command runs."""

from __future__ import annotations

import importlib
from typing import Any

import click

from rlhf_host import __version__
from rlhf_host.errors import RunError, UserError, near_matches

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("rlhf_host.cli.train:train", "Train a model: algorithm, rewards, data and all settings as flags or YAML."),
    "eval": ("rlhf_host.cli.eval:evaluate", "Evaluate a model: pass@k and rewards on one or more task sets."),
    "plugins": ("rlhf_host.cli.plugins:plugins", "List installed plugins; 'plugins show NAME' looks inside one."),
}
"""Name → (``module:attribute`` of the command, its line in ``rlhf --help``)."""


class Failure(click.ClickException):
    """A message for a person, and the exit code."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]


class LazyGroup(click.Group):
    """Commands from ``COMMANDS``; turns the project's errors into a message and an exit code, without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise UserError(f"no command {args[0]!r}{near_matches(args[0], COMMANDS) or '; rlhf --help lists them'}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise Failure(str(error), 2) from error
        except RunError as error:
            raise Failure(str(error), 1) from error
        except OSError as error:
            if error.filename is None:
                raise
            raise Failure(f"{error.filename}: {error.strerror}", 1) from error
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(130)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rlhf")
def main() -> None:
    """Post-training for language models: algorithms, rewards and environments are plugins."""


if __name__ == "__main__":
    main(prog_name="rlhf")
