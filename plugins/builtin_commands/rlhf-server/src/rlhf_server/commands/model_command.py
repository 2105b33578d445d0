"""The shape that ``chat``, ``serve`` and ``serve-reward`` have in common: a command for a model, or for the model of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from rlhf_host import UserError
from rlhf_host.runs import at_step, named_run, run_of
from rlhf_host.settings import CommandLine, RunConfig, SettingsCommand, read_yaml, resolve, use_model

CHECKPOINT = "of a run: best, last or a step (default: the final model; of a run that has not finished, the newest)"

SECTIONS = {"rollout": "Rollouts", "roles": "Models", "data": "Prompts", "train": "Computing"}

WEIGHTS = ("model", "revision", "adapter", "dtype", "quantize", "attn-implementation", "trust-remote-code", "device")

MODEL = (
    *(f"actor.{name}" for name in (*WEIGHTS, "tokenizer")),
    *("seed", "debug", "backend", "runtime", "kernels", "placement", "train.threads", "train.autocast"),
)
"""Settings that define how a model is loaded and computes."""

SAMPLING = ("temperature", "top-p", "top-k", "min-p", "max-new-tokens", "max-tokens", "stop", "stop-token-ids")

ANSWERS = (
    *MODEL,
    *(f"rollout.{name}" for name in (*SAMPLING, "history", "tool-format")),
    *("data.template", "data.system-prompt", "engine"),
)
"""Settings that define how a model answers."""

OF_RUN = ("seed", "roles", "data", "rollout")
"""Sections of a run's settings that define how its model is asked."""


def model_command(
    name: str, *, about: str, start: Mapping[str, str], sections: Mapping[str, str], takes: Sequence[str], example: str
) -> Callable[[Callable[[CommandLine, RunConfig], None]], click.Command]:
    """Returns a decorator that makes ``rlhf NAME MODEL`` of a function, which works until it returns or Ctrl-C ends it.

    Args:
        takes: settings that it uses; others are refused.
        example: what may follow the name.
        start: as ``SettingsCommand``, beside ``--checkpoint``; names without a section are the command's own flags.
    """
    flags = {"checkpoint": CHECKPOINT, **start}

    def decorate(function: Callable[[CommandLine, RunConfig], None]) -> click.Command:
        def command(line: CommandLine) -> None:
            config = _config_of(line, name)
            try:
                function(line, config)
            except KeyboardInterrupt:
                click.echo("Ended.", err=True)

        return SettingsCommand(
            name,
            callback=command,
            help=function.__doc__,
            control=[flag for flag in flags if "." not in flag],
            usage=f"{name} MODEL [FLAGS]",
            about=about,
            start=flags,
            sections=sections,
            takes=takes,
            takes_file=True,
            example=f"{name} {example}",
        )

    return decorate


def _config_of(line: CommandLine, command: str) -> RunConfig:
    """Returns the configuration with MODEL as the actor's; for a run, with its own settings for prompts and sampling. Raises
    ``UserError`` if no model is given.
    """
    path, checkpoint = named_run(Path(line.file or "")), line.value("checkpoint")
    local = path.is_dir() or at_step(path)[1] is not None
    run = run_of(path) if line.file is not None and local else None
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
    if line.file is not None and local:
        use_model(actor, path, checkpoint)
    elif line.file is not None:
        actor.model = line.file
    if not actor.model:
        raise UserError(f"no model is given: rlhf {command} MODEL")
    return config
