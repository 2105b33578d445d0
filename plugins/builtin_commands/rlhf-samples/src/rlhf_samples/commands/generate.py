"""``rlhf generate``: the best of several answers to each prompt, as data to train on."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlhf_host import UserError
from rlhf_host.commands import phase, rlhf
from rlhf_host.installed import recommended
from rlhf_host.settings import CommandLine, SettingsCommand, resolve
from rlhf_samples.checks import check_rollout

if TYPE_CHECKING:
    from rlhf_host.sampling import Collected
    from rlhf_samples.best_answers import Counts

HELP_GROUP = "Train"

START = {
    "output": "FILE.jsonl: where the answers go; the same command continues what was interrupted",
    "keep": "answers of each prompt, the best first; 0: all (int, default 1)",
    "reward": "[ALIAS=]NAME: what scores the answers; repeatable",
    "actor.model": "the model to sample from: a directory, hub name or GGUF file",
    "data": "PATH[@WEIGHT]: a file, directory, hub name or task plugin, every prompt once; repeatable",
    "with": "[ALIAS=]NAME: filters of groups; repeatable",
    "rollout.n": "answers per prompt to choose from (int, default 8)",
    "train.batch-size": "prompts at once (int, default 32)",
    "seed": "fixes the samples (int, default 0)",
    "json": "print a JSON object instead of a table",
}

ABOUT = """Sample several answers to each prompt, score them, and write the best to a file: a line for each, with prompt, completion
and reward. Answers that were cut off at the length limit are left out. Algorithms for
data with answers train on it: rlhf train --algo NAME --data FILE.jsonl."""


@click.command(
    cls=SettingsCommand,
    control=("output", "keep", "json"),
    usage="generate --output FILE.jsonl [FLAGS]",
    about=ABOUT,
    start=START,
    sections={"rollout": "Rollouts", "roles": "Models", "data": "Data"},
    example="generate --output best.jsonl --model models/x --data x.jsonl --n 8",
)
@click.pass_context
def generate(ctx: click.Context, line: CommandLine) -> None:
    """Write the best of several answers to each prompt, to train on."""
    if "output" not in line.own:
        raise UserError("no file is given: add --output FILE.jsonl")
    keep = line.number("keep", "1", "should be a whole number, 0 for all answers") or 0
    loaded = line.read()
    run = resolve(loaded.config, loaded.origins, "rollout")
    config = run.config
    if not config.reward:
        raise UserError("nothing scores the answers: give --reward NAME (rlhf plugins --kind reward lists them)")
    if keep > config.rollout.n:
        raise UserError(f"--keep {keep} is more than the {config.rollout.n} answers of a prompt: set --rollout.n {keep}")
    with closing(run.plugins()) as manager:
        check_rollout(config, manager)
        phase("Loading libraries")
        from rlhf_samples.best_answers import BestAnswers
        from rlhf_samples.sampled import answer_all

        settings = config.model_dump(mode="json", exclude={"run_dir", "tracker", "debug"})
        answers = BestAnswers(Path(line.value("output") or ""), {"config": settings, "keep": keep}, keep)

        def take_in(prompts: int, whole: int, collected: Collected) -> None:
            answers.add(prompts, collected.groups)
            done = answers.counts
            click.echo(f"{done.prompts}/{whole} prompts: {done.written} answers written", err=True)

        interrupted = False
        with answers.held():
            try:
                answer_all(config, manager, answers.begin, take_in)
            except KeyboardInterrupt:
                interrupted = True
            else:
                answers.finish()
    summary = _summary(answers.counts, answers.path)
    if "json" in line.own:
        click.echo(json.dumps(summary, indent=2))
    else:
        _say(summary, interrupted)
    if interrupted:
        ctx.exit(130)


def _summary(counts: Counts, output: Path) -> dict[str, Any]:
    mean = counts.reward_sum / counts.written if counts.written else None
    return {
        "prompts": counts.prompts,
        "answers": counts.answers,
        "cut_off": counts.cut_off,
        "written": counts.written,
        "reward_mean": mean,
        "output": str(output),
    }


def _say(summary: dict[str, Any], interrupted: bool) -> None:
    mean = "" if summary["reward_mean"] is None else f", mean reward {summary['reward_mean']:.4g}"
    click.echo(
        f"{summary['written']} answers to {summary['prompts']} prompts{mean}; {summary['cut_off']} of {summary['answers']} were"
        " cut off at the length limit and left out"
    )
    output = summary["output"]
    if interrupted:
        click.echo(f"Interrupted; what is done is in {output}: the same command continues it")
    elif summary["written"]:
        train = rlhf("train", "--algo", recommended("algo", "answers"), "--data", output)
        click.echo(f"Written to {output}\n  {train} ...    trains on it")
