"""Checkpoints: a directory appears whole or not at all; the last few and the best are kept."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_host.errors import UserError

_STEP = re.compile(r"step-(\d{6,})")
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a resumed run takes up again.

    ``state`` is JSON (step, weight version, data position, best metric); ``tensors`` holds optimizer, random and plugin state.
    """

    path: Path
    step: int
    state: dict[str, Any]
    tensors: dict[str, Any]

    def role(self, name: str) -> Path:
        return self.path / "model" if name == "actor" else self.path / "roles" / name


def write_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """Make ``path`` by filling a hidden sibling, syncing it to disk and renaming; an older ``path`` is replaced last."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    fill(aside)
    for directory, _, files in os.walk(aside):
        for name in files:
            _sync(Path(directory) / name)
        _sync(Path(directory))
    remove_directory(path)
    aside.rename(path)
    _sync(path.parent)


def remove_directory(path: Path) -> None:
    """Rename first, so that a killed removal never leaves half a directory under its name."""
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checkpoint_dirs(run_dir: Path) -> list[tuple[int, Path]]:
    """``(step, path)`` of the whole checkpoints of a run, oldest first."""
    root = run_dir / "checkpoints"
    found = [(int(match[1]), path) for path in root.glob("step-*") if (match := _STEP.fullmatch(path.name))]
    return sorted(found)


def save_checkpoint(
    run_dir: Path,
    step: int,
    state: Mapping[str, Any],
    tensors: Mapping[str, Any],
    save_roles: Mapping[str, Callable[[Path], None]],
) -> Path:
    """Write ``checkpoints/step-NNNNNN``.

    Args:
        state: JSON values.
        tensors: plain values and tensors, read back with ``weights_only``.
        save_roles: role → what writes its model into a directory.
    """

    def fill(directory: Path) -> None:
        for name, save in save_roles.items():
            target = directory / "model" if name == "actor" else directory / "roles" / name
            target.mkdir(parents=True)
            save(target)
        torch.save(dict(tensors), directory / "trainer.pt")
        (directory / "state.json").write_text(json.dumps({"format": FORMAT, "step": step, **state}, indent=1))

    path = run_dir / "checkpoints" / f"step-{step:06d}"
    write_directory(path, fill)
    return path


def keep_checkpoints(run_dir: Path, keep: int, best_step: int | None) -> None:
    """Remove all but the newest ``keep`` (0: all stay) and the best, and what killed writers left behind."""
    for left in (run_dir / "checkpoints").glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)
    found = checkpoint_dirs(run_dir)
    for step, path in found[:-keep] if keep else []:
        if step != best_step:
            remove_directory(path)


def load_checkpoint(run_dir: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run; ``None`` when it was killed before its first.

    Raises:
        UserError: when it was written by another format.
    """
    found = checkpoint_dirs(run_dir)
    if not found:
        return None
    step, path = found[-1]
    state = json.loads((path / "state.json").read_text())
    if state.get("format") != FORMAT:
        raise UserError(f"{path} has checkpoint format {state.get('format')}, this version reads {FORMAT}")
    tensors = torch.load(path / "trainer.pt", weights_only=True, map_location="cpu")
    return Checkpoint(path, step, state, tensors)
