"""``rlhf rollout``: what a run would sample and score, into a file, without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlhf_host import UserError
from rlhf_host.commands import phase, rlhf
from rlhf_host.settings import CommandLine, SettingsCommand, resolve
from rlhf_samples.checks import check_rollout, prompts_per_step

if TYPE_CHECKING:
    from rlhf_host import Trajectory
    from rlhf_host.sampling import Collected

HELP_GROUP = "Train"

START = {
    "output": "FILE.jsonl: where the trajectories go",
    "steps": "batches of train.batch-size prompts (int, default 1)",
    "rollouts": "instead of steps: number of trajectories, rounded up to whole prompts",
    "reward": "[ALIAS=]NAME: what scores the answers; repeatable; without any, rlhf replay can score them later",
    "actor.model": "the model to sample from: a directory, hub name or GGUF file",
    "data": "PATH[@WEIGHT]: a file, directory, hub name or task plugin; repeatable",
    "with": "[ALIAS=]NAME: filters of groups; repeatable",
    "rollout.n": "",
    "seed": "fixes data order and sampling (int, default 0)",
    "json": "print a JSON object instead of a table",
}

ABOUT = """Sample and score as the first steps of rlhf train would with the same flags, and write whole trajectories to a file:
tokens, log-probabilities, versions, rewards. Train on it with rlhf train --from-trajectories, look at it with rlhf replay."""


@click.command(
    cls=SettingsCommand,
    control=("output", "steps", "rollouts", "json"),
    usage="rollout --output FILE.jsonl [FLAGS]",
    about=ABOUT,
    start=START,
    sections={"rollout": "Rollouts", "roles": "Models", "data": "Data"},
    example="rollout --output answers.jsonl --model models/x --data x.jsonl --n 4",
)
@click.pass_context
def rollout(ctx: click.Context, line: CommandLine) -> None:
    """Sample and score without training, into a file."""
    output = Path(line.value("output") or "")
    if "output" not in line.own:
        raise UserError("no file is given: add --output FILE.jsonl")
    loaded = line.read()
    run = resolve(loaded.config, loaded.origins, "rollout")
    config = run.config
    sizes = (line.number(name, None, "should be a whole number from 1", least=1) for name in ("steps", "rollouts"))
    prompts = prompts_per_step(config, *sizes)
    with closing(run.plugins()) as manager:
        check_rollout(config, manager)
        phase("Loading libraries")
        from rlhf_host.sampling import SavedStep, TrajectoryFile
        from rlhf_samples.sampled import sample_steps

        file = TrajectoryFile(output)
        rows: list[Trajectory] = []
        steps = dropped = 0

        def take_in(step: int, collected: Collected) -> None:
            nonlocal steps, dropped
            trajectories = collected.trajectories_in_order()
            rows.extend(trajectories)
            steps, dropped = step, dropped + collected.dropped.total()
            file.add(SavedStep.of(config, step, "train", trajectories))
            click.echo(f"step {step}/{len(prompts)}: {len(trajectories)} trajectories", err=True)

        interrupted = False
        try:
            sample_steps(config, manager, prompts, take_in, {})
        except KeyboardInterrupt:
            interrupted = True
            if not steps:
                raise
        file.write()
    summary = {"steps": steps, **_summary(rows), "groups_dropped": dropped, "output": str(output)}
    if "json" in line.own:
        click.echo(json.dumps(summary, indent=2))
    else:
        _say(summary, interrupted)
    if interrupted:
        ctx.exit(130)


def _summary(rows: Sequence[Trajectory]) -> dict[str, Any]:
    judged = [row.reward for row in rows if row.reward is not None]
    scores = [row.score for row in rows if row.score is not None]
    return {
        "trajectories": len(rows),
        "groups": len({row.group_id for row in rows}),
        "failed": sum(row.failed for row in rows),
        "unjudged": sum(row.reward is None and not row.failed for row in rows),
        "reward_mean": sum(judged) / len(judged) if judged else None,
        "score_mean": sum(scores) / len(scores) if scores else None,
        "length_mean": sum(row.action_length for row in rows) / len(rows) if rows else None,
        "truncated": sum(row.truncated for row in rows),
    }


def _say(summary: dict[str, Any], interrupted: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in summary.items():
        if name != "output":
            shown = "none" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
            table.add_row(name.replace("_", " "), shown)
    Console().print(table)
    output = summary["output"]
    heading = "Interrupted; the finished steps are in" if interrupted else "Written to"
    click.echo(
        f"{heading} {output}\n"
        f"  {rlhf('train', '--from-trajectories', output)} ...    trains on it\n"
        f"  {rlhf('replay', output, '--reward', 'NAME')}    scores it again"
    )
