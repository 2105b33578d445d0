"""A run's model as a directory that other programs load: whole weights, tokenizer, and a model card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rlhf_host import UserError
from rlhf_host.commands import new_directory
from rlhf_host.models import head_of, is_adapter, load_model, load_tokenizer, save_model, save_tokenizer
from rlhf_host.runs import RunModel, refuse_damaged
from rlhf_host.settings import RoleConfig
from rlhf_runs.card import model_card
from rlhf_runs.merging import merge

OTHER = "take another model of the run, as with --checkpoint last"


def export(model: RunModel, output: Path, dtype: str | None, role: str) -> str:
    """Writes the directory ``output``.

    Args:
        dtype: type of the written weights; default: unchanged.
        role: role of the model.

    Returns:
        Lines for people about what was written.

    Raises:
        UserError: the model is damaged, or cannot be loaded.
        RunError: it cannot be written, or merged weights compute something else than the adapter did.
    """
    refuse_damaged(model.path)
    refuse_unreadable(model.path)
    head, merged = head_of(model.path), None
    with new_directory(output, like=model.path) as aside:
        if is_adapter(model.path):
            merged = merge(model.path, None, aside, dtype)
        elif dtype is None:
            _copy(model.path, aside)
        else:
            settings = RoleConfig(model=str(model.path), dtype=dtype, device="cpu")
            save_model(load_model(settings, head=head), aside)
            save_tokenizer(load_tokenizer(settings), aside)
        written = dtype_of(aside)
        card = aside / "README.md"
        card.write_text(model_card(model, role, head, written), "utf-8")
        for file in aside.rglob("*.safetensors"):
            file.chmod(card.stat().st_mode)  # safetensors lets nobody else read what it writes
    if merged is None:
        return written
    merged.check(output)
    return str(merged)


def refuse_unreadable(directory: Path) -> None:
    """Raises ``UserError`` if a file of weights is missing, or its size differs from its header: for a final model nothing else
    is known.
    """
    files = set(directory.glob("*.safetensors"))
    for index in directory.glob("*.safetensors.index.json"):
        try:
            files |= {directory / name for name in json.loads(index.read_text("utf-8"))["weight_map"].values()}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{index} is damaged: it is no list of weights; {OTHER}") from error
    if not files:
        raise UserError(f"{directory} is damaged: it has no safetensors file; {OTHER}")
    for file in sorted(files):
        try:
            with safe_open(file, framework="pt"):
                pass
        except FileNotFoundError as error:
            raise UserError(f"{directory} is damaged: {file.name} is missing; {OTHER}") from error
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} is damaged: {' '.join(str(error).split())}; {OTHER}") from error


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copytree(source, target, dirs_exist_ok=True, copy_function=shutil.copyfile)
    except shutil.Error as error:  # a list of what happened to every file
        raise OSError(error.args[0][0][-1]) from error


def dtype_of(directory: Path) -> str:
    """Returns the type of a whole model's weights, from its configuration."""
    return str(json.loads((directory / "config.json").read_text("utf-8")).get("dtype") or "float32")
