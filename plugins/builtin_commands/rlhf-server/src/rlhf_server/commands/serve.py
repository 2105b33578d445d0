"""``rlhf serve``: a model behind OpenAI's API."""

from __future__ import annotations

import click

from rlhf_host.commands import phase
from rlhf_host.settings import CommandLine, RunConfig
from rlhf_server.commands.address import HOST, address_of
from rlhf_server.commands.model_command import ANSWERS, SECTIONS, model_command

HELP_GROUP = "Use a model"

START = {
    "host": HOST,
    "port": "0: any free one (int, default 8000)",
    "name": "what clients call the model (default: policy)",
    "key-file": "a file with the API key; default: a new key, which is printed",
    "actor.model": "the model, instead of MODEL: a directory, hub name or GGUF file",
    "rollout.max-new-tokens": "longest answer, whatever a request says (int, default 256)",
}

ABOUT = """Serve a model, or the model of a run, with the API that programs see in training: chat and text completions, responses,
tools, token ids and log-probabilities. A run's model gets the run's settings for prompts and sampling. Ctrl-C ends it."""


@model_command("serve", about=ABOUT, start=START, sections=SECTIONS, takes=ANSWERS, example="runs/RUN --port 8000")
def serve(line: CommandLine, config: RunConfig) -> None:
    """Serve a model by OpenAI's API, as programs reach it in training."""
    actor = config.roles["actor"]
    host, port, key = address_of(line, "8000")
    phase("Loading libraries")
    from rlhf_server.app import PolicyServer
    from rlhf_server.serve import serve as run

    name = line.value("name") or "policy"

    def ready(server: PolicyServer) -> None:
        click.echo(f"OPENAI_BASE_URL={server.url}/v1")
        if key is None:
            click.echo(f"OPENAI_API_KEY={server.api_key}")
        click.echo(f"Serving {actor.model} as {name}. Ctrl-C ends it.", err=True)

    run(config, host=host, port=port, model=name, key=key, ready=ready)
