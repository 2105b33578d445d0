"""``rlhf serve-training``: a base model behind Tinker's API."""

from __future__ import annotations

from pathlib import Path

import click
from rlhf_server import HOST, MODEL, address_of, model_command

from rlhf_host import UserError
from rlhf_host.commands import phase
from rlhf_host.settings import CommandLine, RunConfig

HELP_GROUP = "Use a model"

START = {
    "host": HOST,
    "port": "0: any free one (int, default 8010)",
    "name": "what clients call the base model, such as Qwen/Qwen3-8B (default: MODEL)",
    "key-file": "a file with the API key, which begins with tml-; default: TINKER_API_KEY, or a new key, which is printed",
    "states": "folder of saved weights (default: states)",
    "max-models": "how many models are loaded at a time; each is a copy of the base (int, default 4)",
    "actor.model": "the base model, instead of MODEL: a directory or hub name",
}

ABOUT = """Serve a base model with the API of Tinker: clients make LoRA adapters over it, train them by forward_backward and
optim_step with their own data, sample, save and load. Ctrl-C ends it; saved weights stay."""


TAKES = (*(name for name in MODEL if name not in ("runtime", "debug", "placement")), "train.micro-batch-tokens")


@model_command(
    "serve-training",
    about=ABOUT,
    start=START,
    sections={"roles": "Models", "train": "Computing"},
    takes=TAKES,
    example="models/SmolLM2-135M-Instruct --name Qwen/Qwen3-8B",
)
def serve_training(line: CommandLine, config: RunConfig) -> None:
    """Serve a base model to clients of Tinker's API, which train adapters over it."""
    actor = config.roles["actor"]
    host, port, given = address_of(line, "8010")
    most = line.number("max-models", "4", "how many models are loaded at a time, as a whole number")
    if most is None or most < 1:
        raise UserError("--max-models: at least 1")
    if actor.adapter is not None:
        raise UserError(f"{actor.adapter} is an adapter: merge it into its base first (rlhf merge), and serve the result")
    phase("Loading libraries")
    from rlhf_tinker.serve import key_of, serve

    key, new = key_of(given)
    name = line.value("name") or str(actor.model)

    def ready(server: object) -> None:
        click.echo(f"TINKER_BASE_URL={server.url}")  # type: ignore[attr-defined]
        if new:
            click.echo(f"TINKER_API_KEY={key}")
        click.echo(f"Serving {actor.model} as {name} for training. Ctrl-C ends it.", err=True)

    states = Path(line.value("states") or "states").expanduser()
    serve(config, host=host, port=port, name=name, key=key, states=states, most=most, ready=ready)
