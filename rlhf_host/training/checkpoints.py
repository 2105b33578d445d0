"""Checkpoints: a directory appears complete or not at all, with hashes of its files. The last few and the best are kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from rlhf_host.config.run_dir import STATE, checkpoint_dirs
from rlhf_host.directories import new_directory, remove_directory
from rlhf_host.errors import DivergedError, RunError, UserError
from rlhf_host.models.carried import CARRIED
from rlhf_host.once import once
from rlhf_host.protocols import Writer
from rlhf_host.records.torch_files import OTHER, load_data
from rlhf_host.scratch import remove_tree

log = logging.getLogger(__name__)

FORMAT = 4
MANIFEST = "manifest.sha256"
"""Last file of a checkpoint: the hash of every other file, in the format of ``sha256sum``."""
TRAINER = "trainer.pt"
"""Last name in the manifest."""
PIECE = 2**14
"""Number of elements up to which torch computes a norm on one thread."""
ROOM = "make room (a quota counts too), lower --checkpoint.keep, or give the next run another --run-dir"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """State from which a resumed run goes on.

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


def step_dir(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:06d}"


def copy_checkpoint(
    run_dir: Path,
    step: int,
    state: Mapping[str, Any],
    tensors: Mapping[str, Any],
    save_roles: Mapping[str, Callable[[Path], Writer | None]],
    save_state: Callable[[Path], Writer | None],
    save_pending: Callable[[Path], None],
    fields: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[], Path]:
    """Copies everything that ``checkpoints/step-NNNNNN`` will contain. Returns a function that writes it, on any thread; call
    it once.

    Args:
        state: JSON values.
        tensors: plain values and tensors, read back with ``weights_only``; nobody else may change them.
        save_roles: role → a function that writes its model into a directory, or copies it and returns a function that writes
            it.
        save_state: the same for optimizers and schedules.
        save_pending: writes groups that were sampled but not trained into a directory.
        fields: role → fields that its ``config.json`` gets.

    Raises:
        RunError: it cannot be written, or the weights diverged. Both are raised here or by the returned function.
    """
    path = step_dir(run_dir, step)
    before = checkpoint_dirs(run_dir)
    models = {name: Path("model" if name == "actor" else f"roles/{name}") for name in save_roles}
    writers: list[Writer | None] = []
    with contextlib.ExitStack() as opened:
        directory = opened.enter_context(new_directory(path, like=before[-1][1] if before else None, room=ROOM))
        for name, save in save_roles.items():
            (directory / models[name]).mkdir(parents=True)
            writers.append(save(directory / models[name]))
        (directory / "optimizers").mkdir()
        writers.append(save_state(directory / "optimizers"))
        # At once: groups and dicts of the run may change when it goes on.
        save_pending(directory)
        (directory / STATE).write_text(json.dumps({"format": FORMAT, "step": step, **state}, indent=1))
        rest = opened.pop_all()

    def write() -> Path:
        with rest:
            while writers:
                if (writer := writers.pop(0)) is not None:
                    writer()
            for name, model in models.items():
                _refuse_diverged(directory / model, name, step)
                _add_fields(directory / model / "config.json", (fields or {}).get(name, {}))
            torch.save(dict(tensors), directory / TRAINER)
            names = sorted(str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file())
            manifest = "".join(f"{digest}  {name}\n" for name, digest in _hashes(directory, names).items())
            (directory / MANIFEST).write_text(manifest)
        return path

    return write


def _add_fields(path: Path, fields: Mapping[str, Any]) -> None:
    if fields and path.is_file():
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}, indent=2) + "\n")


def link_model(run_dir: Path, step: int) -> None:
    """Makes ``model/`` of the step's checkpoint. Weights are links, so they are on the disk once; where there are no links, and of
    all other files, which people edit, copies. Raises ``RunError`` if it cannot be written.
    """

    def link(source: str, target: str) -> None:
        if source.endswith(".safetensors"):
            with contextlib.suppress(OSError):
                os.link(source, target)
                os.chmod(target, 0o444)  # what changes one in place changes the other
                return
        shutil.copy2(source, target)

    with new_directory(run_dir / "model", room=ROOM) as directory:
        shutil.copytree(step_dir(run_dir, step) / "model", directory, dirs_exist_ok=True, copy_function=link)
        os.utime(directory)  # it has the source's date, and a resume looks which one is newer


def model_written(run_dir: Path, checkpoint: Checkpoint) -> bool:
    """Returns True if ``model/`` exists and was written after this checkpoint."""
    model = run_dir / "model"
    return model.is_dir() and model.stat().st_mtime_ns >= (checkpoint.path / MANIFEST).stat().st_mtime_ns


def _refuse_diverged(model: Path, role: str, step: int) -> None:
    """Raises ``RunError`` for weights that diverged: every resume from them would fail. Weights that are merely huge count too,
    because their squares overflow, here as in the model's norms.
    """
    for file in {*model.glob("*.safetensors")} - {model / CARRIED}:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                # In pieces that one thread computes: others of torch would take the cores of training.
                parts = tensors.get_tensor(name).flatten().split(PIECE)
                norms = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts])
                norm = float(torch.linalg.vector_norm(norms))
                if not math.isfinite(norm):
                    raise DivergedError(f"{role} diverged: after step {step} the norm of {name} is {norm}; lower --{role}.lr")


def _hashes(directory: Path, names: list[str]) -> dict[str, str]:
    def sha256(name: str) -> str:
        with (directory / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(sha256, names), strict=True))


def damage(checkpoint: Path, part: str = "") -> str | None:
    """Returns what is wrong with the files whose names begin with ``part``, or None if they are exactly as written."""
    try:
        text = (checkpoint / MANIFEST).read_text()
        if not text.endswith(f"  {TRAINER}\n"):
            return f"{MANIFEST} is cut off"
        lines = (line.split("  ", 1) for line in text.splitlines())
        written = {name: digest for digest, name in lines if name.startswith(part)}
        hashes = _hashes(checkpoint, list(written))
        # Hidden files are a file manager's, or what a killed resume made anew.
        names = (file.relative_to(checkpoint) for file in sorted(checkpoint.rglob("*")) if file.is_file())
        found = [str(name) for name in names if not any(each.startswith(".") for each in name.parts)]
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(checkpoint)} is missing"
    except (OSError, ValueError) as error:
        return str(error)
    for name in found:
        if name.startswith(part) and name not in written and name != MANIFEST:
            return f"{name} is not in {MANIFEST}"
    changed = next((name for name, digest in hashes.items() if digest != written[name]), None)
    if changed is None:
        return None
    shared = (
        ": it is a file of the run's model/ too, and was changed there" if (checkpoint / changed).stat().st_nlink > 1 else ""
    )
    return f"{changed} is not as it was written{shared}"


@once
def refuse_damaged(model: Path) -> None:
    """Raises ``UserError`` if a model directory of a checkpoint is not as it was written."""
    model = model.absolute()
    for checkpoint in model.parents[:2]:
        if (checkpoint / MANIFEST).is_file() and (
            problem := damage(checkpoint, f"{model.relative_to(checkpoint)}/")
        ) is not None:
            raise UserError(f"{checkpoint} is damaged: {problem}; take another checkpoint of the run")


def plain_state(value: Any, owner: str) -> Any:
    """Returns a copy of ``value`` that ``weights_only`` can read back: plain values, lists, tuples, dicts and tensors. NumPy
    values are converted. Raises ``RunError`` for anything else, naming ``owner``; otherwise it would be saved now and fail at
    the resume.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, OrderedDict):
        return {plain_state(key, owner): plain_state(item, owner) for key, item in value.items()}
    if type(value) in (list, tuple):
        items = [plain_state(item, owner) for item in value]
        return items if isinstance(value, list) else tuple(items)
    kind = type(value).__name__
    raise RunError(
        f"{owner} gives a {kind} in state_dict; a checkpoint keeps plain values, lists, dicts and tensors, not their subclasses"
    )


def keep_checkpoints(run_dir: Path, newest: int, keep: int, spared: Collection[int | None]) -> None:
    """Removes all checkpoints up to step ``newest`` but the spared and the last ``keep`` (0: keeps all), and leftovers of
    killed writers.

    A checkpoint after ``newest`` was abandoned by a resume from an earlier one.
    """
    remove_leftovers(run_dir)
    checkpoints = checkpoint_dirs(run_dir)
    past = [step for step, _ in checkpoints if step <= newest]
    kept = {*(past[-keep:] if keep else past), *spared}
    for step, path in checkpoints:
        if step not in kept:
            remove_directory(path)


def remove_leftovers(run_dir: Path) -> None:
    """Removes what killed writers left behind. Nothing may be written meanwhile."""
    for left in (run_dir / "checkpoints").glob(".step-*"):
        remove_tree(left)


def point_to(run_dir: Path, name: str, step: int) -> None:
    """Links ``name`` (``BEST`` or ``LAST``) to the step's checkpoint, if the file system has links."""
    link = run_dir / name
    aside = link.with_name(f".{link.name}.partial")
    with contextlib.suppress(OSError):
        aside.unlink(missing_ok=True)
        aside.symlink_to(f"step-{step:06d}", target_is_directory=True)
        aside.replace(link)


def _read_state(path: Path) -> dict[str, Any]:
    """Reads the state. Raises ``UserError`` for content that no run writes, even if its hash is in the manifest."""
    try:
        state = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {OTHER}") from error
    lacking = [name for name in ("format", "step") if not isinstance(state, dict) or not isinstance(state.get(name), int)]
    if lacking:
        raise UserError(f"{path} was not written by a run (it needs {' and '.join(lacking)}): {OTHER}")
    return dict(state)


def take_back_replaced(run_dir: Path) -> None:
    """Restores the older checkpoint if the writer was killed between the two renames of a replacement."""
    for old in (run_dir / "checkpoints").glob(".step-*.old"):
        path = old.with_name(old.name[1 : -len(".old")])
        if not path.exists():
            old.rename(path)


def load_checkpoint(run_dir: Path) -> Checkpoint | None:
    """Returns the newest undamaged checkpoint of a run, or None if the run was killed before its first.

    Raises ``UserError`` if all are damaged, or if its format is another.
    """
    damaged = []
    for step, path in reversed(checkpoint_dirs(run_dir)):
        problem = damage(path)
        state = {} if problem else _read_state(path / STATE)
        if not problem and state["step"] != step:
            problem = f"its {STATE} is that of step {state['step']}"
        if problem:
            damaged.append(f"{path} is damaged: {problem}")
            continue
        for line in damaged:
            log.warning("%s; going on from step %d", line, step)
        if state["format"] != FORMAT:
            raise UserError(f"{path} has checkpoint format {state['format']}, this version reads {FORMAT}")
        return Checkpoint(path, step, state, load_data(path / TRAINER, {"plugins": dict, "torch_rng": torch.Tensor}))
    if damaged:
        raise UserError("\n".join([*damaged, f"{run_dir} has no other checkpoint: start a new run"]))
    return None
