"""``rlhf merge-lora``: a LoRA adapter and its base as one model."""

from __future__ import annotations

from pathlib import Path

import click

from rlhf_host import UserError
from rlhf_host.commands import new_directory, phase
from rlhf_host.runs import run_model

HELP_GROUP = "Use a model"

DTYPES = ("float32", "bfloat16", "float16")


@click.command("merge-lora")
@click.argument("adapter", type=click.Path(path_type=Path))
@click.option("--base", help="The model it was trained on, if it is not where the adapter says: a directory or hub name.")
@click.option("--output", "-o", metavar="DIR", type=click.Path(path_type=Path), help="Where to write; default: ADAPTER-merged.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Type of the weights; default: the base's own.")
def merge_lora(adapter: Path, base: str | None, output: Path | None, dtype: str | None) -> None:
    """Merge a LoRA adapter into its base and write the whole model.

    ADAPTER is the directory of an adapter, a checkpoint or a run. The written model is loaded again, and its logits are
    compared with those of the base with the adapter beside it.
    """
    directory = run_model(adapter).path
    output = output or directory.with_name(f"{directory.name}-merged")
    if output.exists():
        raise UserError(f"{output} exists: choose another --output")
    phase("Loading libraries")
    from rlhf_runs.merging import merge

    with new_directory(output) as aside:
        merged = merge(directory, base, aside, dtype)
    click.echo(f"{output}: {merged}")
    merged.check(output)
