"""``rlhf env export``: an agent, its data and rewards as an environment of another project."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from rlhf_host import UserError
from rlhf_host.commands import near_matches, phase
from rlhf_host.settings import CommandLine, Flag, Located, SettingsCommand, read_config

HELP_GROUP = "Use a model"

FORMS = ("openenv", "verifiers", "nemo-gym")

START = {
    "as": "openenv: a server; verifiers: a package that it loads; nemo-gym: a server, or a folder with --output",
    "data": "PATH[@WEIGHT]: the tasks: a file, directory, hub name or task plugin; repeatable",
    "reward": "[ALIAS=]NAME: what scores the answers; repeatable; not needed where the agent gives its own reward",
    "output": "DIR: where the package or the folder is written",
    "force": "replace a folder that this command wrote",
    "name": "what the environment is called (default: NAME)",
    "host": "the address of a server (default 127.0.0.1: this machine alone)",
    "port": "the port of a server; 0: any free one (int, default 8000)",
    "max-episodes": "episodes that may be open at the same time (int, default 256)",
    "idle-s": "open episodes that nobody has asked for so long are closed if room is needed (int, default 1800)",
    "seed": "fixes random numbers of agents, as in a run (int, default 0)",
}

ABOUT = """Let other projects play what runs here play: the agent NAME with its data and rewards, or without NAME one question and
one answer. The same answers get the same rewards there as here. An episode that fails is an error there, and no reward."""

TAKES = (
    *("agent", "agents", "data", "reward", "seed", "debug"),
    *("rollout.step-timeout-s", "rollout.episode-timeout-s", "rollout.score-timeout-s", "rollout.score-retries"),
)


class ExportCommand(SettingsCommand):
    """Shows the options of the agent NAME, too."""

    def show_help(self, line: CommandLine) -> None:
        chosen = [] if line.file is None else [Flag("agent", line.file)]
        super().show_help(replace(line, flags=[*chosen, *line.flags]))


@click.command(
    cls=ExportCommand,
    control=tuple(name for name in START if name not in ("data", "reward", "seed")),
    usage="env export [NAME] [FLAGS]",
    about=ABOUT,
    start=START,
    sections={"data": "Data"},
    takes=TAKES,
    takes_file=True,
    example="env export --data sums.jsonl --reward {reward} --as openenv --port 8000",
)
def export(line: CommandLine) -> None:
    """Export an agent with its data and rewards as an environment of OpenEnv, verifiers or NeMo Gym."""
    form = line.value("as")
    if form not in FORMS:
        told = "--as is missing" if form is None else f"--as {form} is not known"
        near = "" if form is None else near_matches(form, FORMS)
        raise UserError(f"{told}: give --as {', --as '.join(FORMS[:-1])} or --as {FORMS[-1]}{near}")
    port = line.number("port", None, "a whole number from 0 to 65535")
    if port is not None and port > 65535:
        raise UserError(f"--port {port}: a whole number from 0 to 65535")
    most = line.number("max-episodes", "256", "how many episodes may be open, as a whole number from 1", least=1)
    idle_s = line.number("idle-s", "1800", "seconds, as a whole number from 1", least=1)
    output = line.value("output")
    _refuse_mixed(form, output, port, line)
    loaded = read_config(_with_agent(line), line.flags, line.names, quickstart=False)
    for notice in loaded.notices:
        click.echo(notice, err=True)
    config = loaded.config
    name = line.value("name") or (line.file or "single_turn").rpartition(":")[2]
    phase("Loading libraries")
    from rlhf_environments.opening import opened

    limits: dict[str, Any] = {"most": most, "idle_s": float(idle_s or 0)}
    with opened(config, loaded.origins, **limits) as environment:
        for told in environment.report:
            click.echo(told, err=True)
        if output is not None:
            from rlhf_environments.written import write

            write(form, environment, config, Path(output), name, force="force" in line.own, limits=limits)
            return
        _serve(form, environment, name, line.value("host") or "127.0.0.1", 8000 if port is None else port)


def _refuse_mixed(form: str, output: str | None, port: int | None, line: CommandLine) -> None:
    """Raises ``UserError`` for a form without a place, and for two."""
    if form == "verifiers" and output is None:
        raise UserError("--as verifiers is a package: add --output DIR")
    if form == "openenv" and output is not None:
        raise UserError("--as openenv is a server: leave --output out, and give --port")
    if form == "nemo-gym" and output is None and port is None:
        raise UserError("--as nemo-gym: add --output DIR to write a folder for NeMo Gym, or --port to serve its protocol here")
    if output is not None and (served := [name for name in ("port", "host") if name in line.own]):
        raise UserError(f"--output writes, and --{served[0]} serves: give one of them")
    if output is not None:
        from rlhf_environments.written import refuse_existing

        refuse_existing(Path(output).expanduser(), "force" in line.own)


def _with_agent(line: CommandLine) -> Any:
    """Returns the files of the line, and its agent by NAME. Raises ``UserError`` for two agents."""
    if line.file is None:
        return line.configs
    if any(flag.keys[0] == "agent" and len(flag.keys) == 1 for flag in line.flags):
        raise UserError(f"{line.file} and --agent both name the agent: give one of them")
    return [*line.configs, Located({"agent": Located({"name": Located(line.file, "NAME")}, "NAME")}, "NAME")]


def _serve(form: str, environment: Any, name: str, host: str, port: int) -> None:
    from rlhf_environments.gym import GymServer
    from rlhf_environments.openenv import OpenEnvServer
    from rlhf_environments.serving import serve

    played = environment.environment
    server = OpenEnvServer(played, name) if form == "openenv" else GymServer(played)

    def ready(server: Any) -> None:
        click.echo(server.url)
        click.echo(f"{name} as an environment of {form}. Ctrl-C ends it.", err=True)

    serve(environment, server, host, port, ready)
