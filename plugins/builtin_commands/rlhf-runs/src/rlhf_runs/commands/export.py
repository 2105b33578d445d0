"""``rlhf export``: a run's model for other programs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from rlhf_host import UserError
from rlhf_host.commands import Scratch, phase
from rlhf_host.runs import RunModel, run_model
from rlhf_runs.commands.merge_lora import DTYPES

HELP_GROUP = "Use a model"

GGUF = "gguf"


def which_model(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the argument and options that choose a run's model and the type of its weights."""
    for add in (
        click.option("--dtype", type=click.Choice(DTYPES), help="Type of the weights; default: as they are."),
        click.option("--role", default="actor", show_default=True, metavar="NAME", help="Whose model: actor, critic, ..."),
        click.option(
            "--checkpoint",
            metavar="best|last|STEP",
            help="Default: the final model; of a run that has not finished, the newest checkpoint.",
        ),
        click.argument("run", type=click.Path(path_type=Path)),
    ):
        command = add(command)
    return command


@click.command()
@which_model
@click.option(
    "--output", "-o", required=True, metavar="DIR|FILE.gguf|gguf", help="Where to write; gguf: RUN.gguf in this directory."
)
@click.option(
    "--converter", type=click.Path(path_type=Path), help="llama.cpp's convert_hf_to_gguf.py, if it is not on the PATH."
)
def export(run: Path, checkpoint: str | None, role: str, dtype: str | None, output: str, converter: Path | None) -> None:
    """Write the model of RUN as a directory that transformers and vLLM load, or as a GGUF file.

    RUN is a run directory or a checkpoint in it. Adapters are merged. The directory has the tokenizer, the chat template and
    a model card with the run's figures, data and settings. GGUF files are written by llama.cpp's own converter.
    """
    model = chosen_model(run, checkpoint, role)
    if output == GGUF or output.endswith(f".{GGUF}"):
        path = _path(f"{model.run.absolute().name}.{GGUF}" if output == GGUF and model.run else output, model)
        phase("Loading libraries")
        from rlhf_runs.export import export as write
        from rlhf_runs.gguf import convert, find_converter

        command = find_converter(converter)
        with Scratch("rlhf-export-", tempfile.gettempdir()) as scratch:
            write(model, scratch / "model", dtype, role)
            convert(command, scratch / "model", path)
        click.echo(f"{path}: {described(model)}")
        return
    if converter is not None:
        raise UserError("--converter is for GGUF files: give --output FILE.gguf, or leave it out")
    path = _path(output, model)
    phase("Loading libraries")
    from rlhf_runs.export import export as write

    written = write(model, path, dtype, role)
    click.echo(f"{path}: {described(model)}, {written}")


def chosen_model(run: Path, checkpoint: str | None, role: str) -> RunModel:
    """Returns the model of a run. Raises ``UserError`` if it does not belong to one."""
    model = run_model(run, checkpoint, role)
    if model.run is None:
        raise UserError(f"{run} is in no run directory, which rlhf train writes: there is nothing to say about its training")
    if model.notice:
        click.echo(model.notice, err=True)
    return model


def described(model: RunModel) -> str:
    assert model.run is not None
    path, run = model.path.absolute(), model.run.absolute()
    if not path.is_relative_to(run):  # rebuilt for this command, and gone with it
        return f"{model.run}@{model.step}"
    step = "" if model.step is None else f", step {model.step}"
    return f"{path.relative_to(run)} of {model.run}{step}"


def _path(output: str, model: RunModel) -> Path:
    """Returns the output path. Raises ``UserError`` if nothing can be written there, or if the run itself keeps its models
    there.
    """
    path, empty = Path(output), False
    if path.is_dir() and not path.is_symlink() and path.suffix != f".{GGUF}":
        empty = not any(path.iterdir())
    if not output or (empty and path.name in ("", "..")):
        raise UserError(f"--output {output!r} names no directory to write: give a new name")
    if not empty and (path.exists() or path.is_symlink()):
        raise UserError(f"{path} exists: choose another --output")
    above = next(parent for parent in path.absolute().parents if parent.exists() or parent.is_symlink())
    if not above.is_dir():
        raise UserError(f"{path} cannot be written: {above} is not a directory; choose another --output")
    for own in (model.run / "model", model.run / "checkpoints") if model.run else ():
        if path.resolve().is_relative_to(own.resolve()):
            raise UserError(f"{path} is in {own}, which the run keeps for itself: choose another --output")
    return path
