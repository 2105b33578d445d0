"""``rlhf push``: a run's model on the Hugging Face Hub."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from rlhf_host.commands import Scratch, phase
from rlhf_runs.commands.export import chosen_model, described, which_model

HELP_GROUP = "Use a model"


@click.command()
@which_model
@click.argument("repo_id")
@click.option("--private", is_flag=True, help="A new repository is private.")
def push(run: Path, repo_id: str, checkpoint: str | None, role: str, dtype: str | None, private: bool) -> None:
    """Upload what ``rlhf export`` writes of RUN to the repository REPO_ID of the Hugging Face Hub.

    The repository is made where there is none. Others may read the model card: look at it first, in the directory that
    rlhf export writes. It needs a token with the right to write (hf auth login, or HF_TOKEN).
    """
    model = chosen_model(run, checkpoint, role)
    phase("Loading libraries")
    from rlhf_runs.export import export
    from rlhf_runs.push import check_hub, upload

    check_hub(repo_id)
    with Scratch("rlhf-push-", tempfile.gettempdir()) as scratch:
        export(model, scratch / "model", dtype, role)
        phase("Uploading")
        address = upload(scratch / "model", repo_id, f"{described(model)}, by rlhf push", private=private)
    click.echo(address)
