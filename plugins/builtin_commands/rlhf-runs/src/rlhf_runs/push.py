"""A directory as a repository of the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from rlhf_host import RunError, UserError
from rlhf_host.commands import first_line
from rlhf_host.models import hub_answers


def check_hub(repo_id: str) -> None:
    """Raises ``UserError`` if nothing can be uploaded from here, or the repository's name is invalid."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"{repo_id} is no name of a repository, such as my-name/my-model: {first_line(error)}") from error
    if get_token() is None:
        raise UserError("there is no token for the hub: hf auth login, or set HF_TOKEN; it needs the right to write")
    if not hub_answers():
        offline = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else "it cannot be reached from here"
        raise UserError(f"{constants.ENDPOINT}: {offline}; rlhf export writes the same files into a directory")


def upload(directory: Path, repo_id: str, message: str, *, private: bool) -> str:
    """Creates the repository if it does not exist, and adds the files in one commit.

    Returns:
        The commit's address.

    Raises:
        RunError: the hub refuses it, or can no longer be reached.
    """
    hub = HfApi()
    try:
        repository = hub.create_repo(repo_id, private=private, exist_ok=True)
        commit = hub.upload_folder(folder_path=directory, repo_id=repository.repo_id, commit_message=message)
    except Exception as error:  # which library speaks HTTP, and so its errors, depends on the version of huggingface_hub
        raise RunError(f"{repo_id} is not uploaded to {constants.ENDPOINT}: {first_line(error)}") from error
    return str(commit.commit_url)
