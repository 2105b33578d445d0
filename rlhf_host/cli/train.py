"""``rlhf train``: from flags and files to a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import click

from rlhf_host.cli.configured import CommandLine, SettingsCommand
from rlhf_host.command import rlhf
from rlhf_host.config.check import check
from rlhf_host.config.load import QUICKSTART
from rlhf_host.config.recipes import require_models
from rlhf_host.config.resolve import merge_needs, resolve
from rlhf_host.config.resumed import check_resume, require_plugins
from rlhf_host.config.run_dir import BEST, CONFIG, config_yaml, require_run, with_run_dir
from rlhf_host.config.schema import RunConfig
from rlhf_host.config.tree import SHORT
from rlhf_host.errors import UserError
from rlhf_host.phases import phase
from rlhf_host.plugins.catalogue import install_line
from rlhf_host.plugins.manager import Loaded
from rlhf_host.plugins.selection import imported, python_name
from rlhf_host.plugins.spellings import written_short
from rlhf_host.records.figures import beside, figure
from rlhf_host.records.needs import Needs, Outcome

HELP_GROUP = "Train"

CONTROL = ("resume", "force", "dry-run", "print-config")

START = {
    "algo": "NAME: the algorithm",
    "reward": "[ALIAS=]NAME: what scores the answers; repeatable; replaces the rewards of the file",
    "actor.model": "the model to train: a directory, hub name or GGUF file",
    "data": "PATH[@WEIGHT]: a file, directory, hub name or task plugin; repeatable; replaces the data of the file",
    "eval.data": "PATH[@WEIGHT]: the same, for evaluation",
    "actor.lr": "",
    "train.steps": "",
    "train.batch-size": "",
    "rollout.n": "",
    "rollout.max-new-tokens": "",
    "run-dir": "where the run is written (default runs/<time>-<name>)",
    "resume": "RUN_DIR: continue from its newest checkpoint with its settings; flags may change some, such as --train.steps",
    "force": "with --resume: let the algorithm, seed, order of the data or models change too",
    "from-trajectories": "FILE: train on trajectories of rlhf rollout, or of a run with --trajectories.tokens, without sampling",
    "async-depth": "maximum age of a batch, in weight versions: sampling goes on while the trainer works (int)",
    "in-flight-updates": "with --async-depth: new weights come while requests are answered (default: where engine and runtime can)",
    "max-restarts": "how often a run begins again from its checkpoint by itself, whatever died (int, default 0)",
    "debug": "run everything in one process and one thread, so that a debugger works in any plugin",
    "placement": "ROLE+ROLE=DEVICES: these roles share devices (rollout: the engines); repeatable",
    "seed": "",
    "name": "the run's name (default <algorithm>-<first reward>)",
    "dry-run": "check everything, train and write nothing",
    "print-config": "print the whole configuration as YAML, with plugins' options, and stop",
}

SECTIONS = {
    "rollout": "Rollouts",
    "pipeline": "Sampling ahead (--async-depth)",
    "train": "Training",
    "roles": "Models",
    "data": "Data",
    "eval": "Evaluation",
    "checkpoint": "Checkpoints",
    "trajectories": "Trajectory files",
}

ABOUT = """Train a language model. Every setting is both a flag and a key of the YAML file: --rollout.n 4 is 'rollout: {n: 4}'.
Flags override the file. Write a list by repeating its flag or with commas; a flag without a value is true."""


@click.command(
    cls=SettingsCommand,
    control=CONTROL,
    usage="train [FLAGS]",
    about=ABOUT,
    start=START,
    sections=SECTIONS,
    short={**SHORT, "output": "run-dir"},
    example="train --algo {algo} --reward {reward} --model models/x --data x.jsonl",
)
@click.pass_context
def train(ctx: click.Context, line: CommandLine) -> None:
    """Train a model: algorithm, rewards, data and all settings as flags or YAML."""
    resume = _resumed(line)
    loaded = line.read(resume / CONFIG if resume else None)
    config, begun = loaded.config, resume
    if config.max_restarts and not {"dry-run", "print-config"} & line.own.keys():
        config, begun = _supervised(config, resume)
    if begun:
        require_plugins(begun, config)
    run = resolve(config, loaded.origins)
    config = run.config
    changes = check_resume(begun, config, force="force" in line.own) if begun else []
    if changes and not resume:
        raise UserError(f"{begun} has a run, {changes[0]}: choose another --run-dir, or {rlhf('train', '--resume', begun)}")
    if "print-config" in line.own:
        click.echo(config_yaml(config), nl=False)
        return
    from rlhf_host.cli.dry_run import dry_run, told

    for name in line.configs:
        require_models(name, config)
    with closing(run.plugins()) as manager:
        needs = merge_needs(manager)
        for warning in [*changes, *check(run, manager, needs)]:
            click.echo(f"Warning: {warning}", err=True)
        dry = "dry-run" in line.own
        config = config.model_copy(update={"run_dir": str(begun)}) if begun else with_run_dir(config, make=not dry)
        if dry:
            dry_run(config, manager, begun)
            return
        phase("Loading libraries")
        from rlhf_host.training.run import train as start

        outcome = start(config, manager, resume=begun)
        as_they_come = all(map(_as_it_comes, (item for item in manager.loaded if item.kind in ("reward", "agent"))))
    click.echo("\n".join([_what_next(outcome, config, needs, as_they_come), *told("afterword", config)]))
    ctx.exit(130 if outcome.status == "interrupted" else 0)


def _supervised(config: RunConfig, resume: Path | None) -> tuple[RunConfig, Path | None]:
    """Returns, in each of the processes that the run has one after the other, its configuration and the directory to resume."""
    if (info := python_name("supervised")) is None:
        raise UserError(f"max_restarts needs another package: {install_line('rlhf-supervisor')}")
    if resume is None and not (config.run_dir and (Path(config.run_dir) / CONFIG).is_file()):
        config = with_run_dir(config)
    return config, imported(info)(resume or config.run_dir, restarts=config.max_restarts)


def _as_it_comes(item: Loaded) -> bool:
    """Returns True if its name alone chooses it as it is."""
    options = getattr(type(item.plugin), "Options", None)
    usual = options.model_construct().model_dump() if options is not None else {}
    return item.weight == 1.0 and all(usual.get(name) == value for name, value in item.options.items())


def _what_next(outcome: Outcome, config: RunConfig, needs: Needs, as_they_come: bool) -> str:
    """Returns what the run has left, and commands that work on it.

    Args:
        as_they_come: rewards and agents have their default options.
    """
    run_dir = Path(str(config.run_dir))
    if outcome.status == "interrupted":
        resume = rlhf("train", "--resume", run_dir)
        return f"\nInterrupted after step {outcome.step}; a checkpoint is written. Continue with:\n  {resume}"
    early = f" after step {outcome.step} ({outcome.reason})" if outcome.reason else ""
    parts = [name for name in ("metrics.jsonl", "trajectories/", "checkpoints/", "model/") if (run_dir / name).exists()]
    lines = [f"\nFinished{early}. Everything is in {run_dir}: {', '.join(parts)}"]
    if "eval/pass@1" in (metrics := outcome.metrics):
        more = f"; {text}" if (text := beside(metrics, "eval/pass@1")) else ""
        score = figure(metrics, "eval/pass@1", ".3f")
        lines.append(f"Held-out pass@1 at the end: {score} over {metrics.get('eval/samples', 0):.0f} samples{more}")
    if not needs.samples and (loss := outcome.metrics.get("eval/loss")) is not None:
        lines.append(f"Held-out loss at the end: {loss:.4f}")
    if (best := run_dir / BEST).exists():
        lines.append(f"The best {config.checkpoint.best} is that of {best.resolve().name}: {best} points to it")
    commands = list(_commands(outcome, config, needs, run_dir, as_they_come))
    lines += ["What to try next:"] if commands else []
    lines += [f"  {about}:\n    {command}" for about, command in commands]
    return "\n".join(lines)


def _commands(
    outcome: Outcome, config: RunConfig, needs: Needs, run_dir: Path, as_they_come: bool
) -> Iterator[tuple[str, str]]:
    """Yields what to type, and what it does."""
    saved = (run_dir / "checkpoints").exists()
    if needs.samples and (saved or (run_dir / "model").exists()) and (config.data.sources or config.eval.data.sources):
        more = ["--eval.n", max(4, 2 * config.eval.n)] if config.eval.temperature else []  # greedy samples are all the same
        scored = more and {"score/mean", "eval/score/mean"} & outcome.metrics.keys()
        yield "evaluate, with pass@k" if scored else "evaluate", rlhf("eval", "--checkpoint", run_dir, *more)
    if saved and outcome.reason is None and config.from_trajectories is None:
        by_steps = needs.samples or config.train.steps is not None
        more = ["--steps", 2 * outcome.step] if by_steps else ["--data.epochs", f"{2 * config.data.epochs:g}"]
        yield "continue training", rlhf("train", "--resume", run_dir, *more)
    usual = as_they_come and config.agent == RunConfig().agent and not config.agents
    if config.roles["actor"].model == QUICKSTART and config.algo is not None and usual:
        named = {alias: written_short("reward", choice.name, choice.options) for alias, choice in config.reward.items()}
        judges = [f"{alias}={name}" if alias != name else alias for alias, name in named.items()]
        chosen = ["--algo", config.algo.name, *(word for judge in judges for word in ("--reward", judge))]
        yield "train a model of your own", rlhf("train", *chosen, "--model", "DIR", "--data", "FILE.jsonl")


def _resumed(line: CommandLine) -> Path | None:
    """The run directory to go on in, or ``None`` for a new run."""
    if (run_dir := line.value("resume")) is None:
        if "force" in line.own:
            raise UserError("--force goes with --resume")
        return None
    if clashes := line.chosen_settings + [flag.text for flag in line.flags if flag.keys == ["run_dir"]]:
        raise UserError(f"--resume uses the run's own directory and settings: leave {clashes[0]} out")
    return require_run(Path(run_dir)).parent
