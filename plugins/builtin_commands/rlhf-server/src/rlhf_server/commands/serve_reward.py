"""``rlhf serve-reward``: a reward model behind HTTP."""

from __future__ import annotations

import click

from rlhf_host.commands import phase
from rlhf_host.settings import CommandLine, RunConfig
from rlhf_server.commands.address import HOST, address_of
from rlhf_server.commands.model_command import MODEL, model_command

HELP_GROUP = "Use a model"

START = {
    "host": HOST,
    "port": "0: any free one (int, default 5000)",
    "name": "what answers call the model (default: MODEL)",
    "key-file": "a file with a key that clients must send; default: none",
    "actor.model": "the reward model, instead of MODEL: a directory or hub name",
    "rollout.max-tokens": "longer texts get no reward (int, default: the model's context)",
}

ABOUT = """Serve a model with a scalar head, or that of a run that trained one. Trainers that speak OpenRLHF's remote reward
protocol ask it at /get_reward. Ctrl-C ends it."""


@model_command(
    "serve-reward",
    about=ABOUT,
    start=START,
    sections={"roles": "Models", "train": "Passes"},
    takes=(*MODEL, "train.max-tokens-per-microbatch", "rollout.max-tokens"),
    example="models/reward --port 8001",
)
def serve_reward(line: CommandLine, config: RunConfig) -> None:
    """Serve a reward model, as the reward http_reward asks it."""
    host, port, key = address_of(line, "5000")
    phase("Loading libraries")
    from rlhf_server.rewards import RewardServer
    from rlhf_server.serve import serve_reward as run

    name = line.value("name") or str(config.roles["actor"].model)

    def ready(server: RewardServer) -> None:
        click.echo(f"{server.url}/get_reward")
        click.echo(f"Serving {name}. Ctrl-C ends it.", err=True)

    run(config, host=host, port=port, model=name, key=key, ready=ready)
