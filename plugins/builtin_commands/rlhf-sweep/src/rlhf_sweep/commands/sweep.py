"""``rlhf sweep``: settings by seeds, run, compared and shown."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import click

from rlhf_host import RunError, UserError
from rlhf_host.commands import phase, rlhf, write_file
from rlhf_host.settings import CommandLine, SettingsCommand
from rlhf_sweep.execute import Here, Launcher, execute
from rlhf_sweep.folder import Folder
from rlhf_sweep.planned import Planned, planned
from rlhf_sweep.queue import FixedQueue, ProposedQueue, about, corners, fixed_combinations
from rlhf_sweep.request import FLAGS, LIMIT, Request, read_request
from rlhf_sweep.results import Results, read_by, seeds, summary

HELP_GROUP = "Train"

PAGE = "report.html"
SHOWN = 200
"""Runs that a dry run lists."""

START = {
    "vary.SETTING": "VALUES: what a setting of rlhf train is varied over: A,B,C, LOW..HIGH, LOW..HIGH:log:COUNT or :lin:COUNT,"
    " JSON for lists and mappings; for --sampler also LOW..HIGH:log or :lin; repeatable",
    "seeds": "0,1,2 or 0..2: each combination is run with each seed, and their mean counts",
    "output": "the folder that the runs, their table and their page are written to (default sweeps/<hash of the settings>)",
    "by": "METRIC[:min|:max]: what settings are compared by (default: checkpoint.best, else that of the last evaluation"
    " that all have, else the reward; metrics of training are means over the last quarter)",
    "at-once": "N: so many runs at a time (default: 1; with --on ray as many as the cluster has room for)",
    "on": "local: processes of this machine; ray: tasks of a Ray cluster, of RAY_ADDRESS or of this machine alone (default local)",
    "sampler": "random, or of optuna tpe, gp: draw settings in place of the whole grid",
    "trials": "N: so many settings are drawn, each with every seed",
    "sampler-seed": "fixes the draws (int, default 0)",
    "limit": f"N: refuse sweeps of more runs (int, default {LIMIT})",
    "failed": "retry: run failed ones again, from their checkpoint if they have one (default keep: they stay failed)",
    "dry-run": "check every combination, list the runs, write nothing",
    "json": "print the results as a JSON object instead of a table",
}

ABOUT = """Train with every combination of some settings, each with several seeds, and compare. All flags of rlhf train hold
for every run; --vary.SETTING gives alternatives. FILE.yaml has the same: settings: (as in a file of rlhf train), vary:, seeds:,
and the other flags as keys. The same command goes on with a sweep that was stopped or killed, and shows one that is finished."""


@click.command(
    cls=SettingsCommand,
    control=(*FLAGS, "dry-run", "json"),
    usage="sweep [FILE.yaml] [FLAGS]",
    about=ABOUT,
    start=START,
    sections={},
    takes_file=True,
    example="sweep --vary.algo {algo},grpo --vary.lr 1e-4..1e-2:log:3 --seeds 0..2 --reward {reward}",
)
@click.pass_context
def sweep(ctx: click.Context, line: CommandLine) -> None:
    """Train with settings by seeds, and compare the results."""
    request = read_request(line, ctx.command.short)  # type: ignore[attr-defined]
    by = read_by(request.by)
    combinations = fixed_combinations(request)
    runs, notices = planned(request, corners(request) if combinations is None else combinations)
    for notice in notices:
        click.echo(notice, err=True)
    folder = Folder(_output(request, runs))
    known = [] if combinations is None else runs
    folder.check(about(request), known, grows=combinations is None)
    click.echo(f"{_told(request, runs, combinations is None)}\nFolder: {folder.path}", err=True)
    if "dry-run" in line.own:
        _list(known)
        return
    again = rlhf("sweep", *_words(line))
    launcher = _launcher(request)
    try:
        with folder.locked():
            folder.check(about(request), known, grows=combinations is None)
            folder.write_record(about(request), known)
            queue = FixedQueue(runs) if combinations is not None else ProposedQueue(request, folder, by, _say)
            statuses = {run.name: folder.status(run) for run in queue.runs}
            ended = [
                name
                for name, status in statuses.items()
                if status in (("finished",) if request.retry else ("finished", "failed"))
            ]
            if ended:
                failed = sum(statuses[name] == "failed" for name in ended)
                _say(
                    f"{len(ended)} runs had ended before"
                    + (f", {failed} of them failed (--failed retry runs them again)" if failed else "")
                )
            queue.begin(lambda run: run.name not in ended)
            try:
                execute(folder, launcher, queue.next, _say)
            except KeyboardInterrupt:
                click.echo(f"\nInterrupted. Go on with:\n  {again}", err=True)
                ctx.exit(130)
            results = Results(folder, queue.runs, by)
            _show(results, "json" in line.own)  # first: a disk that is full has no room for the page
            page = _write_page(results, folder)
    finally:
        launcher.close()
    click.echo(f"Page: {page}", err="json" in line.own)
    if results.failed:
        names = ", ".join(name for name, _ in results.failed[:5]) + (" ..." if len(results.failed) > 5 else "")
        retry = rlhf("sweep", *_words(line), "--failed", "retry")
        count = f"{len(results.failed)} of {len(queue.runs)} runs"
        raise RunError(f"{count} failed: {names}. They count nowhere; to run them again:\n  {retry}")


def _say(text: str) -> None:
    click.echo(text, err=True)


def _output(request: Request, runs: Sequence[Planned]) -> Path:
    if request.output is not None:
        if not request.output.strip():
            raise UserError("--output is empty: it names the folder of the sweep")
        return Path(request.output).expanduser()
    facts = [about(request), [run.identity for run in runs]]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
    algos = {run.config.algo.name for run in runs if run.config.algo is not None}
    return Path("sweeps") / f"{algos.pop() if len(algos) == 1 else 'sweep'}-{digest}"


def _told(request: Request, runs: Sequence[Planned], proposed: bool) -> str:
    """Returns how large the sweep is."""
    each = len(request.seeds or (0,))
    settings = (request.trials or 0) if proposed else len(runs) // each
    text = f"{settings * each} runs: {settings} setting{'s' * (settings != 1)} × {seeds(each)}"
    steps = [run.config.train.steps for run in runs]
    known = [count for count in steps if count is not None]
    if proposed or len(known) < len(steps):
        return text
    made = sum(run.config.train.batch_size * run.config.rollout.n * (run.config.train.steps or 0) for run in runs)
    return f"{text}; {sum(known):,} steps in all, about {made:,} answers where answers are sampled"


def _list(runs: Sequence[Planned]) -> None:
    for run in runs[:SHOWN]:
        click.echo(run.name)
    if len(runs) > SHOWN:
        click.echo(f"and {len(runs) - SHOWN} more")


def _launcher(request: Request) -> Launcher:
    if request.on == "local":
        return Here(request.at_once or 1)
    phase("Loading Ray")
    from rlhf_sweep.on_ray import OnRay

    return OnRay(request.at_once)


def _words(line: CommandLine) -> list[str]:
    """Returns the words of the command, without those that hold for one call."""
    words = [] if line.file is None else [line.file]
    for name, values in line.own.items():
        if name != "failed":
            for value in values:
                words += [f"--{name}"] if value is None else [f"--{name}", value]
    for flag in line.flags:
        words += (
            [flag.text]
            if flag.value is None
            else [f"{flag.text}={flag.value}"]
            if flag.value.startswith("-")
            else [flag.text, flag.value]
        )
    return words


def _show(results: Results, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(summary(results), indent=2))
    else:
        from rlhf_sweep.table import show

        show(results)


def _write_page(results: Results, folder: Folder) -> Path:
    from rlhf_sweep.page import page

    path = folder.path / PAGE
    write_file(path, page(results).encode())
    return path
