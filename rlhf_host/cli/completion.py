"""``rlhf completion``: the script that makes a shell complete commands, flags and plugin names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

HELP_GROUP = "Plugins"

WHERE = {
    "bash": 'eval "$(rlhf completion bash)"    # in ~/.bashrc',
    "zsh": 'eval "$(rlhf completion zsh)"     # in ~/.zshrc, after compinit',
    "fish": "rlhf completion fish > ~/.config/fish/completions/rlhf.fish",
}


@click.command(epilog="\b\n" + "\n".join(WHERE.values()))
@click.argument("shell", type=click.Choice(list(WHERE)))
def completion(shell: str) -> None:
    """Print the script that completes commands, flags and plugin names in SHELL (bash, zsh or fish)."""
    from rlhf_host.cli.main import main

    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(main, {}, "rlhf", "_RLHF_COMPLETE").source())
