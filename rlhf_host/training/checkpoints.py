"""Checkpoints: a directory appears whole or not at all; the last few and the best are kept."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_host.config.run_dir import BEST
from rlhf_host.directories import remove_directory, write_directory
from rlhf_host.errors import RunError, UserError

_STEP = re.compile(r"step-(\d{6,})")
FORMAT = 3


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a resumed run takes up again.

    ``state`` is JSON (step, weight version, data position, best metric); ``tensors`` holds random and plugin state.
    """

    path: Path
    step: int
    state: dict[str, Any]
    tensors: dict[str, Any]

    @property
    def optimizers(self) -> Path:
        return self.path / "optimizers"

    def role(self, name: str) -> Path:
        return self.path / "model" if name == "actor" else self.path / "roles" / name


def checkpoint_dirs(run_dir: Path) -> list[tuple[int, Path]]:
    """``(step, path)`` of the whole checkpoints of a run, oldest first."""
    root = run_dir / "checkpoints"
    return sorted((int(match[1]), path) for path in root.glob("step-*") if (match := _STEP.fullmatch(path.name)))


def save_checkpoint(
    run_dir: Path,
    step: int,
    state: Mapping[str, Any],
    tensors: Mapping[str, Any],
    save_roles: Mapping[str, Callable[[Path], None]],
    save_state: Callable[[Path], None],
) -> Path:
    """Write ``checkpoints/step-NNNNNN``.

    Args:
        state: JSON values.
        tensors: plain values and tensors, read back with ``weights_only``.
        save_roles: role → what writes its model into a directory.
        save_state: writes optimizers and schedules into a directory.
    """

    def fill(directory: Path) -> None:
        for name, save in save_roles.items():
            target = directory / "model" if name == "actor" else directory / "roles" / name
            target.mkdir(parents=True)
            save(target)
        (directory / "optimizers").mkdir()
        save_state(directory / "optimizers")
        torch.save(dict(tensors), directory / "trainer.pt")
        (directory / "state.json").write_text(json.dumps({"format": FORMAT, "step": step, **state}, indent=1))

    path = run_dir / "checkpoints" / f"step-{step:06d}"
    write_directory(path, fill)
    return path


def plain_state(value: Any, owner: str) -> Any:
    """``value`` as what ``weights_only`` reads back: plain values, lists, tuples, dicts and tensors; NumPy becomes these.
    Raises ``RunError`` for anything else, naming ``owner``: it would be saved now and fail at the resume."""
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {plain_state(key, owner): plain_state(item, owner) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [plain_state(item, owner) for item in value]
        return items if isinstance(value, list) else tuple(items)
    kind = type(value).__name__
    raise RunError(f"{owner} gives a {kind} in state_dict; a checkpoint keeps plain values, lists, dicts and tensors")


def keep_checkpoints(run_dir: Path, keep: int, best_step: int | None) -> None:
    """Remove all but the newest ``keep`` (0: all stay) and the best, and what killed writers left behind."""
    for left in (run_dir / "checkpoints").glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)
    for step, path in checkpoint_dirs(run_dir)[:-keep] if keep else []:
        if step != best_step:
            remove_directory(path)


def mark_best(run_dir: Path, step: int) -> None:
    """Let ``checkpoints/best`` link to the step's checkpoint, where the file system has links."""
    link = run_dir / BEST
    aside = link.with_name(f".{link.name}.partial")
    with contextlib.suppress(OSError):
        aside.unlink(missing_ok=True)
        aside.symlink_to(f"step-{step:06d}", target_is_directory=True)
        aside.replace(link)


def load_checkpoint(run_dir: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run; ``None`` when it was killed before its first. Raises ``UserError`` when it was
    written by another format."""
    for old in (run_dir / "checkpoints").glob(".step-*.old"):
        # A kill between the two renames of a replacement leaves the older whole one under this name.
        path = old.with_name(old.name[1 : -len(".old")])
        if not path.exists():
            old.rename(path)
    whole = checkpoint_dirs(run_dir)
    if not whole:
        return None
    step, path = whole[-1]
    try:
        state = json.loads((path / "state.json").read_text())
        tensors = torch.load(path / "trainer.pt", weights_only=True, map_location="cpu")
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}); remove it to resume from the one before") from error
    if state.get("format") != FORMAT:
        raise UserError(f"{path} has checkpoint format {state.get('format')}, this version reads {FORMAT}")
    return Checkpoint(path, step, state, tensors)
