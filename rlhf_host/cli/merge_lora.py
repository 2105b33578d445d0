"""``rlhf merge-lora``: a LoRA adapter and its base as one model."""

from __future__ import annotations

from pathlib import Path

import click

from rlhf_host.cli.eval import model_of
from rlhf_host.errors import RunError, UserError
from rlhf_host.phases import phase

TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest gap of logits, relative to the largest logit; 16-bit types round the merged weights."""


@click.command("merge-lora")
@click.argument("adapter", type=click.Path(path_type=Path))
@click.option("--base", help="The model it was trained on, if it is not where the adapter says: a directory or hub name.")
@click.option("--output", type=click.Path(path_type=Path), help="Where to write; default: ADAPTER-merged.")
@click.option("--dtype", type=click.Choice(list(TOLERANCE)), help="Type of the weights; default: the base's own.")
def merge_lora(adapter: Path, base: str | None, output: Path | None, dtype: str | None) -> None:
    """Merge a LoRA adapter into its base and write the whole model.

    ADAPTER is the directory of an adapter, a checkpoint or a run. The written model is loaded again, and its logits are
    compared with those of the base with the adapter beside it.
    """
    directory = model_of(adapter)
    output = output or directory.with_name(f"{directory.name}-merged")
    if output.exists():
        raise UserError(f"{output} exists: choose another --output")
    phase("Loading libraries")
    from rlhf_host.models.merging import merge

    merged = merge(directory, base, output, dtype)
    compared = f"logits differ by at most {merged.gap:.1e} from those of the base with its adapter (largest: {merged.size:.3g})"
    click.echo(f"{output}: {merged.dtype}, {compared}")
    if not merged.gap <= TOLERANCE[merged.dtype] * merged.size:
        raise RunError(f"{output} does not compute what {directory} does: {compared}")
