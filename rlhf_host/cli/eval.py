"""``rlhf eval``: a model's answers, judged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import click

from rlhf_host.cli.configured import CommandLine, SettingsCommand
from rlhf_host.config.check import check_evaluation
from rlhf_host.config.resolve import Resolved, resolve
from rlhf_host.config.resumed import require_plugins
from rlhf_host.config.run_dir import require_run
from rlhf_host.config.schema import RoleConfig, RunConfig
from rlhf_host.config.tree import SHORT
from rlhf_host.errors import UserError, visible
from rlhf_host.phases import phase
from rlhf_host.records.figures import beside, figure
from rlhf_host.runs.directory import HEADLINES
from rlhf_host.runs.models import at_step, run_model, run_of

HELP_GROUP = "Train"

CONTROL = ("checkpoint", "output", "json")

START = {
    "actor.model": "the model: a directory, hub name, GGUF file, checkpoint, run directory or RUN_DIR@STEP",
    "checkpoint": "RUN_DIR, a checkpoint in it or RUN_DIR@STEP: its model, with the run's settings",
    "eval.data": "PATH[@WEIGHT]: what to answer; repeatable (default: --data)",
    "reward": "[ALIAS=]NAME: what scores the answers; repeatable; replaces the rewards of the file",
    "eval.n": "",
    "eval.temperature": "",
    "rollout.max-new-tokens": "per turn (int, default 256)",
    "output": "FILE.jsonl: every answer with its tokens and rewards, as rlhf rollout writes them",
    "json": "print a JSON object instead of a table",
}

SECTIONS = {"eval": "Evaluation", "rollout": "Rollouts", "roles": "Models", "data": "Data"}

ABOUT = "Evaluate a language model: rewards and pass@k on one or more task sets. Flags and files are those of rlhf train."


@click.command(
    "eval",
    cls=SettingsCommand,
    control=CONTROL,
    usage="eval [FLAGS]",
    about=ABOUT,
    start=START,
    sections=SECTIONS,
    short={**SHORT, "n": "eval.n"},
    example="eval --model models/x --data test.jsonl --reward {reward} --n 4",
)
def evaluate(line: CommandLine) -> None:
    """Evaluate a model: pass@k and rewards on one or more task sets."""
    checkpoint, config_path = line.value("checkpoint"), None
    if checkpoint is not None:
        line.refuse_settings("--checkpoint uses the run's own model and settings")
        config_path = require_run(run_of(Path(checkpoint)) or Path(checkpoint))
    loaded = line.read(config_path)
    config = judged_by(with_defaults(loaded.config, checkpoint), line)
    if config_path is not None and not config.eval.reward:
        require_plugins(config_path.parent, config, ("reward", "agent"))
    run = resolve(config, loaded.origins, "evaluate")
    output = line.value("output")
    metrics = evaluated(run, None if output is None else Path(output))
    if "json" in line.own:
        click.echo(json.dumps(dict(metrics), indent=2))
    else:
        _print_table(metrics)


def evaluated(run: Resolved, output: Path | None = None) -> dict[str, float]:
    """Evaluates the actor of a configuration that was resolved for ``evaluate``; returns metrics under ``eval/``.

    Args:
        output: a file for all trajectories.

    Raises:
        UserError: the settings or the model cannot be used.
        RunError: too many answers could not be judged.
    """
    with closing(run.plugins()) as manager:
        check_evaluation(run.config, manager)
        phase("Loading libraries")
        from rlhf_host.training.evaluate_only import evaluate_only

        return evaluate_only(run.config, manager, output)


def with_defaults(config: RunConfig, checkpoint: str | None) -> RunConfig:
    """The configuration with the model that is meant, and with the training data where there is no other."""
    config = config.model_copy(deep=True)
    actor = config.roles["actor"]
    if checkpoint is not None:
        use_model(actor, Path(checkpoint))
    elif actor.model and (Path(actor.model).is_dir() or at_step(Path(actor.model))[1] is not None):
        actor.model = str(run_model(Path(actor.model)).path)
    if not config.eval.data.sources:
        config.eval.data = config.data
    return config


def judged_by(config: RunConfig, line: CommandLine) -> RunConfig:
    """Returns the configuration with the rewards of the command line: ``--reward`` replaces ``eval.reward`` of a file too.

    Raises:
        UserError: the command line has both, of which one would do nothing.
    """
    rewards = [flag.text for flag in line.flags if flag.keys[:1] == ["reward"]]
    evaluation = [flag.text for flag in line.flags if flag.keys[:2] == ["eval", "reward"]]
    if rewards and evaluation:
        raise UserError(f"{rewards[0]} has no effect beside {evaluation[0]}: leave one of them out")
    if rewards:
        config = config.model_copy(update={"eval": config.eval.model_copy(update={"reward": {}})})
    return config


def use_model(actor: RoleConfig, path: Path, checkpoint: str | None = None) -> None:
    """Let the actor of a run's settings have the model of the run, or of a checkpoint; a person hears which where it is not the
    final one."""
    model = run_model(path, checkpoint)
    actor.model, actor.revision, actor.adapter = str(model.path), None, None
    if model.notice:
        click.echo(f"{model.path}: {model.notice}", err=True)


def _print_table(metrics: Mapping[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("metric", "value", box=None, pad_edge=False)
    for name in metrics:
        if not name.endswith("/stderr"):
            table.add_row(Text(visible(name)), figure(metrics, name))
    Console().print(table)
    for name in HEADLINES:
        if name in metrics and (text := beside(metrics, name)):
            click.echo(f"{name}: {text}")
