"""``rlhf serve-reward``: a reward model behind HTTP."""

from __future__ import annotations

import click

from rlhf_host.commands import phase
from rlhf_host.settings import CommandLine, SettingsCommand
from rlhf_server.commands.serve import CHECKPOINT, address_of, config_of

HELP_GROUP = "Use a model"

CONTROL = ("checkpoint", "host", "port", "name", "key-file")

START = {
    "checkpoint": CHECKPOINT,
    "host": "the address to listen on; one that others reach needs --key-file (default 127.0.0.1)",
    "port": "0: any free one (int, default 5000)",
    "name": "what answers call the model (default: MODEL)",
    "key-file": "a file with a key that clients must send; default: none",
    "actor.model": "the reward model, instead of MODEL: a directory or hub name",
    "rollout.max-tokens": "longer texts get no reward (int, default: the model's context)",
}

ABOUT = """Serve a model with a scalar head, or that of a run that trained one. Trainers that speak OpenRLHF's remote reward
protocol ask it at /get_reward. Ctrl-C ends it."""


@click.command(
    "serve-reward",
    cls=SettingsCommand,
    control=CONTROL,
    usage="serve-reward MODEL [FLAGS]",
    about=ABOUT,
    start=START,
    sections={"roles": "Models", "train": "Passes"},
    takes_file=True,
)
@click.pass_context
def serve_reward(ctx: click.Context, line: CommandLine) -> None:
    """Serve a reward model, as the reward http_reward asks it."""
    config = config_of(line, "serve-reward")
    host, port, key = address_of(line, "5000")
    phase("Loading libraries")
    from rlhf_server.rewards import RewardServer
    from rlhf_server.serve import serve_reward as run

    name = line.value("name") or str(config.roles["actor"].model)

    def ready(server: RewardServer) -> None:
        click.echo(f"{server.url}/get_reward")
        click.echo(f"Serving {name}. Ctrl-C ends it.", err=True)

    try:
        run(config, host=host, port=port, model=name, key=key, ready=ready)
    except KeyboardInterrupt:
        click.echo("Ended.", err=True)
