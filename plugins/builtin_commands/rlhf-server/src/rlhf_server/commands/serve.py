"""``rlhf serve``: a model behind OpenAI's API."""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from pathlib import Path

import click

from rlhf_host import UserError
from rlhf_host.commands import phase
from rlhf_host.runs import run_of
from rlhf_host.settings import CommandLine, RunConfig, SettingsCommand, read_yaml, resolve, use_model

HELP_GROUP = "Use a model"

CHECKPOINT = "of a run: best, last or a step (default: the final model; of a run that has not finished, the newest)"

CONTROL = ("checkpoint", "host", "port", "name", "key-file")

START = {
    "checkpoint": CHECKPOINT,
    "host": "the address to listen on; one that others reach needs --key-file (default 127.0.0.1)",
    "port": "0: any free one (int, default 8000)",
    "name": "what clients call the model (default: policy)",
    "key-file": "a file with the API key; default: a new key, which is printed",
    "actor.model": "the model, instead of MODEL: a directory, hub name or GGUF file",
    "rollout.max-new-tokens": "longest answer, whatever a request says (int, default 256)",
}

SECTIONS = {"rollout": "Rollouts", "roles": "Models"}

OF_RUN = ("seed", "roles", "data", "rollout")
"""Sections of a run's settings that define how its model is asked."""

ABOUT = """Serve a model, or the model of a run, with the API that programs see in training: chat and text completions, responses,
tools, token ids and log-probabilities. A run's model gets the run's settings for prompts and sampling. Ctrl-C ends it."""


@click.command(
    cls=SettingsCommand,
    control=CONTROL,
    usage="serve MODEL [FLAGS]",
    about=ABOUT,
    start=START,
    sections=SECTIONS,
    takes_file=True,
)
@click.pass_context
def serve(ctx: click.Context, line: CommandLine) -> None:
    """Serve a model by OpenAI's API, as programs reach it in training."""
    config = config_of(line, "serve")
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

    try:
        run(config, host=host, port=port, model=name, key=key, ready=ready)
    except KeyboardInterrupt:
        click.echo("Ended.", err=True)


def config_of(line: CommandLine, command: str) -> RunConfig:
    """Returns the configuration with MODEL as the actor's; for a run, with its own settings for prompts and sampling. Raises
    ``UserError`` if no model is given.
    """
    path, checkpoint = Path(line.file or ""), line.value("checkpoint")
    run = run_of(path) if line.file is not None and path.is_dir() else None
    if checkpoint is not None and run is None:
        raise UserError(f"--checkpoint {checkpoint}: chooses one of a run: rlhf {command} RUN_DIR --checkpoint {checkpoint}")
    if run is None:
        loaded = line.read(quickstart=False)
    else:
        line.refuse_settings(f"{line.file} is a run's model, and uses the run's own settings")
        settings = read_yaml(run / "config.yaml")
        of_run = {key: value for key, value in settings.value.items() if key in OF_RUN}
        loaded = line.read(replace(settings, value=of_run), quickstart=False)
        loaded.config.data.sources = []
    config = resolve(loaded.config, loaded.origins, "rollout").config
    actor = config.roles["actor"]
    if line.file is not None and path.is_dir():
        use_model(actor, path, checkpoint)
    elif line.file is not None:
        actor.model = line.file
    if not actor.model:
        raise UserError(f"no model is given: rlhf {command} MODEL")
    return config


def address_of(line: CommandLine, port: str) -> tuple[str, int, str | None]:
    """Returns host, port and key. Raises ``UserError`` for an address that others reach without a key."""
    host, port, key = line.value("host") or "127.0.0.1", line.value("port") or port, _key(line.value("key-file"))
    if not port.isdecimal() or int(port) > 65535:
        raise UserError(f"--port {port}: should be a whole number from 0 to 65535")
    if key is None and not _is_loopback(host):
        raise UserError(f"--host {host}: others can reach it: give --key-file FILE with a key of your own")
    return host, int(port), key


def _key(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        key = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--key-file {file}: {getattr(error, 'strerror', None) or 'no text in UTF-8'}") from error
    if len(key) < 16:
        raise UserError(f"--key-file {file}: a key has at least 16 characters; this one has {len(key)}")
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
