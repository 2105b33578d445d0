"""``rlhf bisect``: the step at which a figure of a run's model changed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from rlhf_host import UserError
from rlhf_host.commands import near_matches, visible
from rlhf_host.runs import model_steps, require_run
from rlhf_host.settings import CommandLine, RunConfig, SettingsCommand, evaluated, judged_by, resolve, use_model

HELP_GROUP = "Look at runs"

METRIC = "eval/reward/mean"

START = {
    "good": "STEP: where the figure is still as it should be (default: the first step whose weights are there)",
    "bad": "STEP: where it no longer is (default: the last one)",
    "threshold": "VALUE: search the step at which the figure crosses it (default: always go on in the half that changes more)",
    "metric": f"what is compared, by its name in rlhf eval --json (default: {METRIC})",
    "reward": "[ALIAS=]NAME: what scores the answers; repeatable (default: the run's)",
    "eval.data": "PATH[@WEIGHT]: what to answer; repeatable (default: the run's held-out data, or else its data)",
    "eval.n": "samples per prompt (int, default 1)",
    "eval.temperature": "0: greedy (float, default 0)",
    "rollout.max-new-tokens": "per turn (default: as in the run)",
    "json": "print a JSON object instead of a table",
}

ABOUT = """Search the step of a run at which a figure of its model changed. The weights after some steps between two are evaluated,
each time with the same prompts, in as few evaluations as a binary search needs. Steps are those of checkpoints, and all that the
weight sync delta has kept."""


@click.command(
    "bisect",
    cls=SettingsCommand,
    control=("good", "bad", "threshold", "metric", "json"),
    usage="bisect RUN [FLAGS]",
    about=ABOUT,
    start=START,
    sections={"rollout": "Rollouts", "data": "Data"},
    takes=(
        *("reward", "eval.data", "eval.reward", "eval.n", "eval.k", "eval.temperature", "eval.top-p", "eval.top-k"),
        *("eval.min-p", "eval.max-new-tokens", "eval.seed", "agent", "agents", "rollout", "data", "seed", "debug"),
        *("engine", "kernels", "runtime", "backend", "placement", "train.threads", "train.autocast", "actor.device"),
    ),
    takes_file=True,
    example="bisect runs/RUN --reward math_verifier --threshold 0.5",
)
def bisect(line: CommandLine) -> None:
    """Find the step at which a figure of a run's model changed."""
    if line.file is None:
        raise UserError("no run is given: rlhf bisect RUN_DIR")
    config_file = require_run(Path(line.file))
    run = config_file.parent
    line.refuse_settings("rlhf bisect uses the run's own models and settings")
    good, bad, steps = _ends(line, run)
    threshold = _number(line.value("threshold"))
    loaded = line.read(config_file)
    config = _greedy(loaded.config, line)
    metric = line.value("metric") or METRIC

    def figure(step: int) -> float:
        chosen = config.model_copy(deep=True)
        use_model(chosen.roles["actor"], Path(f"{run}@{step}"))
        value = _figure(evaluated(resolve(chosen, loaded.origins, "evaluate")), metric, step)
        click.echo(f"step {step}: {value:.4g}", err=True)
        return value

    tried = dict[int, float]()

    def told(step: int) -> float:
        if step not in tried:
            tried[step] = figure(step)
        return tried[step]

    before, after = search(steps, good, bad, told, threshold)
    if "json" in line.own:
        values = {str(step): tried[step] for step in sorted(tried)}
        click.echo(json.dumps({"metric": metric, "step": after, "before": before, "tried": values}, indent=2))
    else:
        _print(tried, metric, before, after)


def search(
    steps: Sequence[int], good: int, bad: int, figure: Callable[[int], float], threshold: float | None = None
) -> tuple[int, int]:
    """Returns two steps next to each other between which the figure changes.

    Args:
        steps: steps that can be asked for, in order; good and bad are among them.
        threshold: the two are on different sides of it. None: of both halves, always that with the larger change is searched.

    Raises:
        UserError: good and bad do not differ in that.
    """
    one, other = steps.index(good), steps.index(bad)
    left, right = figure(good), figure(bad)
    if threshold is None and left == right:
        raise UserError(f"the figure is {left:.4g} at step {good} and at step {bad}: give other steps, or --threshold")
    if threshold is not None and (left >= threshold) == (right >= threshold):
        side = "at or above" if left >= threshold else "below"
        raise UserError(
            f"the figure is {left:.4g} at step {good} and {right:.4g} at step {bad}, both {side} {threshold:g}: give another"
            " --threshold, or other steps"
        )
    while abs(other - one) > 1:
        middle = (one + other) // 2
        value = figure(steps[middle])
        if threshold is None:
            first = abs(value - left) < abs(right - value)
        else:
            first = (value >= threshold) == (left >= threshold)
        if first:
            one, left = middle, value
        else:
            other, right = middle, value
    return steps[one], steps[other]


def _ends(line: CommandLine, run: Path) -> tuple[int, int, list[int]]:
    """Returns the two steps of the search, and all steps of the run."""
    steps = model_steps(run)
    if len(steps) < 2:
        raise UserError(f"{run} has the weights of {len(steps)} steps, and a search needs two: train with --sync delta")
    ends = [_step(line, "good", steps, steps[0]), _step(line, "bad", steps, steps[-1])]
    if ends[0] == ends[1]:
        raise UserError(f"--good and --bad are both step {ends[0]}: give two steps")
    return ends[0], ends[1], steps


def _step(line: CommandLine, name: str, steps: Sequence[int], default: int) -> int:
    text = line.value(name)
    if text is None:
        if name in line.own:
            raise UserError(f"--{name}: needs a step")
        return default
    if text not in map(str, steps):
        raise UserError(
            f"--{name} {text}: should be a step whose weights are there, of {len(steps)} from {steps[0]} to {steps[-1]}"
            f"{near_matches(text, map(str, steps))}"
        )
    return int(text)


def _number(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"--threshold {text}: should be a number")
    return value


def _greedy(config: RunConfig, line: CommandLine) -> RunConfig:
    """Returns the run's settings with the same prompts, one answer each, sampled greedily where no flag says another way."""
    config = judged_by(config.model_copy(deep=True), line)
    chosen = {".".join(flag.keys) for flag in line.flags}
    if "eval.temperature" not in chosen:
        config.eval.temperature = 0.0
    if "eval.n" not in chosen:
        config.eval.n, config.eval.k = 1, config.eval.k if "eval.k" in chosen else []
    if not config.eval.data.sources:
        config.eval.data = config.data
    return config


def _figure(metrics: dict[str, float], name: str, step: int) -> float:
    if name not in metrics:
        near = near_matches(name, metrics) or f"; it has {', '.join(metrics)}"
        raise UserError(f"--metric {name}: rlhf eval has no such metric{near}")
    if not math.isfinite(metrics[name]):
        raise UserError(f"{name} is {metrics[name]} at step {step}: give another --metric")
    return float(metrics[name])


def _print(tried: dict[int, float], metric: str, before: int, after: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("step", justify="right")
    table.add_column(visible(metric), justify="right")
    table.add_column("")
    for step in sorted(tried):
        table.add_row(str(step), f"{tried[step]:.4g}", "changed" if step == after else "")
    Console().print(table)
    click.echo(f"Step {after}: {visible(metric)} is {tried[after]:.4g}, and was {tried[before]:.4g} at step {before}.")
