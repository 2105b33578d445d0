"""``rlhf xray``: one saved batch, and what each algorithm would do with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import gettempdir

import click

from rlhf_host import UserError
from rlhf_host.commands import Scratch, phase, write_file
from rlhf_host.settings import CommandLine, SettingsCommand, split_names, write_yaml

HELP_GROUP = "Look at runs"

START = {
    "algo": "NAME,NAME/LOSS,...: what to compare (default: all that train on sampled answers, and the losses of one)",
    "step": "N: the step of a file or a run that has several; RUN@N is the same",
    "output": "FILE.html: write a page with the answers coloured token by token",
    "rows": "how many answers the page has, those with the strongest push first (int, default 32; 0: all)",
    "weights": "all, lora, last-layer, or a pattern of names, such as '*mlp*': gradients are by these weights (default all)",
    "old-logprobs": "model: as in the first update of a batch, with ratios of 1; file: ratios to the log-probabilities of the"
    " file, as in a later update (default: file if the model has learnt from the batch)",
    "only-actor": "true: load no critic and no reference; algorithms that need one are left out (default false)",
    "json": "print everything as a JSON object instead of a table",
    "actor.model": "needed for a file; of a run the default is the model that sampled the step, or the one after it",
}
SECTIONS = ("roles", "train", "backend", "kernels", "seed")
"""Sections of settings that models and devices have."""
USED = (
    "actor",
    "critic",
    "reference",
    "teacher",
    "roles",
    "train.threads",
    "train.micro-batch-tokens",
    "backend",
    "kernels",
    "seed",
)

ABOUT = """Compare what algorithms would do with one batch of saved answers: cosines between and lengths of their gradients,
how many answers and tokens act, in how few tokens half of the push lies. FILE is what rlhf rollout wrote, or RUN@STEP: a run with
--trajectories.tokens. The model is loaded once, and nothing is trained."""


@click.command(
    cls=SettingsCommand,
    control=tuple(name for name in START if name != "actor.model"),
    usage="xray FILE [FLAGS]",
    about=ABOUT,
    start=START,
    sections={"roles": "Models"},
    takes=USED,
    takes_file=True,
    example="xray runs/sums@40 -o xray.html",
)
def xray(line: CommandLine) -> None:
    """Compare what each algorithm would do with one saved batch, token by token."""
    if line.file is None:
        raise UserError("no batch is given: rlhf xray RUN@STEP, or rlhf xray FILE.jsonl --model DIR")
    step = line.number("step", None, "the number of a step")
    shown = line.number("rows", "32", "how many answers the page has, as a whole number; 0: all")
    only = line.value("only-actor", "false")
    if only not in ("true", "false"):
        raise UserError(f"--only-actor {only}: it is true or false")
    html = line.value("output")
    if html is not None and Path(html).suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--output {html}: the page needs a name that ends in .html")
    named = line.value("algo")
    loaded = line.read(quickstart=False)
    config = loaded.config
    given = config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    chosen = {str(path[0]) for path in loaded.origins if path}
    kept = {name: value for name, value in given.items() if name in SECTIONS and name in chosen}
    with Scratch("rlhf-xray-", gettempdir()) as directory:
        file = directory / "settings.yaml"
        write_file(file, write_yaml(kept).encode())
        phase("Loading libraries")
        from rlhf_host.sampling import plain
        from rlhf_xray.functions import USUAL, compare
        from rlhf_xray.page import page
        from rlhf_xray.table import show

        found = compare(
            line.file,
            algos=None if named is None else split_names(named),
            model=config.roles["actor"].model if "actor" in config.roles else None,
            step=step,
            weights=line.value("weights", "all") or "all",
            old_logprobs=line.value("old-logprobs"),
            only_actor=only == "true",
            config=file if kept else None,
            on_progress=_progress,
            settings={name: value for name, value in USUAL.items() if name not in kept},
        )
    if html is not None:
        write_file(Path(html), page(found, shown or len(found.answers)).encode())
    if "json" in line.own:
        click.echo(json.dumps(plain(found.row()), indent=2))
        return
    show(found)
    if html is not None:
        click.echo(f"Page: {html}")


def _progress(name: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{name} ...\r", err=True, nl=False)
